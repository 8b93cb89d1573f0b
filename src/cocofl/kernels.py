"""All that an int8 layer type or a kernel of one's own is made of: ``docs/guides/extend.md``."""

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
