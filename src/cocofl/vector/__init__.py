"""A chain with a device axis: the devices of a round as one computation."""

from cocofl.vector.cohort import Cohort, DeviceWork, Rows, RuleMemory, Source
from cocofl.vector.optimizer import Adam, Optimizer, Sgd
from cocofl.vector.precision import PRECISIONS
from cocofl.vector.program import Program

__all__ = [
    "PRECISIONS",
    "Adam",
    "Cohort",
    "DeviceWork",
    "Optimizer",
    "Program",
    "Rows",
    "RuleMemory",
    "Sgd",
    "Source",
]
