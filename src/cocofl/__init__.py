"""CoCoFL: federated learning for devices of unequal strength."""

from cocofl.budget import Budget
from cocofl.chain import BlockChain, Wiring, split
from cocofl.config import Experiment
from cocofl.errors import (
    CannotLower,
    CannotSplit,
    CocoflError,
    InvalidBudget,
    InvalidExample,
    InvalidModel,
    InvalidSetting,
    InvalidSpan,
    InvalidState,
    InvalidTable,
    KernelMissing,
    NoFeasibleSpan,
)
from cocofl.experiment import Run, simulate
from cocofl.fl.select import feasible, maximal
from cocofl.freeze import FrozenNet, KernelPlan, Update, calibrate, chain_state, freeze
from cocofl.profiling import ProfileTable
from cocofl.source import VERSION as __version__  # noqa: N811 - as all packages call it
from cocofl.span import Blocks, Role, Span, all_spans

__all__ = [
    "BlockChain",
    "Blocks",
    "Budget",
    "CannotLower",
    "CannotSplit",
    "CocoflError",
    "Experiment",
    "FrozenNet",
    "InvalidBudget",
    "InvalidExample",
    "InvalidModel",
    "InvalidSetting",
    "InvalidSpan",
    "InvalidState",
    "InvalidTable",
    "KernelMissing",
    "KernelPlan",
    "NoFeasibleSpan",
    "ProfileTable",
    "Role",
    "Run",
    "Span",
    "Update",
    "Wiring",
    "__version__",
    "all_spans",
    "calibrate",
    "chain_state",
    "feasible",
    "freeze",
    "maximal",
    "simulate",
    "split",
]
