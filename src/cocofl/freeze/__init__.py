"""Freeze, fuse and quantize part of a chain, and train the rest."""

from cocofl.freeze.adapters import AdaptedChain, LowRank
from cocofl.freeze.adapting import adapt
from cocofl.freeze.calibration import calibrate
from cocofl.freeze.kernel_plan import KernelPlan
from cocofl.freeze.kernels import KERNELS, Geometry, Kernel, LinearMap, Prepared, backend_names
from cocofl.freeze.layers import LAYERS, LinearLayer
from cocofl.freeze.net import VARIANTS, FrozenNet, first_blocks, freeze
from cocofl.freeze.network import Network, upload_sizes
from cocofl.freeze.precision import BFLOAT16, FLOAT32, PRECISIONS
from cocofl.freeze.state import State, Update, chain_state, check_state

__all__ = [
    "BFLOAT16",
    "FLOAT32",
    "KERNELS",
    "LAYERS",
    "PRECISIONS",
    "VARIANTS",
    "AdaptedChain",
    "FrozenNet",
    "Geometry",
    "Kernel",
    "KernelPlan",
    "LinearLayer",
    "LinearMap",
    "LowRank",
    "Network",
    "Prepared",
    "State",
    "Update",
    "adapt",
    "backend_names",
    "calibrate",
    "chain_state",
    "check_state",
    "first_blocks",
    "freeze",
    "upload_sizes",
]
