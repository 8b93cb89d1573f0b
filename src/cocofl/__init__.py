"""CoCoFL: federated learning for devices of unequal strength."""

from cocofl.chain import BlockChain, Wiring, split
from cocofl.errors import (
    CannotLower,
    CannotSplit,
    CocoflError,
    InvalidExample,
    InvalidModel,
    InvalidSetting,
    InvalidSpan,
    InvalidState,
    KernelMissing,
)
from cocofl.freeze import FrozenNet, KernelPlan, Update, chain_state, freeze
from cocofl.span import Role, Span, all_spans

__all__ = [
    "BlockChain",
    "CannotLower",
    "CannotSplit",
    "CocoflError",
    "FrozenNet",
    "InvalidExample",
    "InvalidModel",
    "InvalidSetting",
    "InvalidSpan",
    "InvalidState",
    "KernelMissing",
    "KernelPlan",
    "Role",
    "Span",
    "Update",
    "Wiring",
    "all_spans",
    "chain_state",
    "freeze",
    "split",
]
