"""Freeze, fuse and quantize part of a chain, and train the rest."""

from cocofl.freeze.kernels import KERNELS
from cocofl.freeze.net import BACKENDS, VARIANTS, FrozenNet, freeze
from cocofl.freeze.plan import KernelPlan
from cocofl.freeze.state import State, Update, chain_state, check_state, upload_sizes

__all__ = [
    "BACKENDS",
    "KERNELS",
    "VARIANTS",
    "FrozenNet",
    "KernelPlan",
    "State",
    "Update",
    "chain_state",
    "check_state",
    "freeze",
    "upload_sizes",
]
