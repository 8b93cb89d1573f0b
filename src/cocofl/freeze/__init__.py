"""Freeze, fuse and quantize part of a chain, and train the rest."""

from cocofl.freeze.kernel_plan import KernelPlan
from cocofl.freeze.kernels import KERNELS
from cocofl.freeze.layers import LAYERS, LinearLayer
from cocofl.freeze.net import BACKENDS, VARIANTS, FrozenNet, freeze
from cocofl.freeze.network import Network
from cocofl.freeze.state import State, Update, chain_state, check_state

__all__ = [
    "BACKENDS",
    "KERNELS",
    "LAYERS",
    "VARIANTS",
    "FrozenNet",
    "KernelPlan",
    "LinearLayer",
    "Network",
    "State",
    "Update",
    "chain_state",
    "check_state",
    "freeze",
]
