"""All that int8 layers or kernels of one's own are made of: ``docs/guides/extend-kernels.md``."""

from cocofl.freeze import KERNELS, LAYERS, Geometry, Kernel, LinearLayer, LinearMap, Prepared
from cocofl.numerics import Codes, Grid, as_float, quantize

__all__ = [
    "KERNELS",
    "LAYERS",
    "Codes",
    "Geometry",
    "Grid",
    "Kernel",
    "LinearLayer",
    "LinearMap",
    "Prepared",
    "as_float",
    "quantize",
]
