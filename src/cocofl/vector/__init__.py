"""A chain with a device axis: the devices of a round as one computation."""

from cocofl.vector.program.program import Program
from cocofl.vector.program.row_layout import Rows, Segments
from cocofl.vector.training import losses
from cocofl.vector.training.agreement import disagreement, narrows
from cocofl.vector.training.cohort import Cohort, DeviceWork, Source
from cocofl.vector.training.execution import PRECISIONS, Graphs, Precision, load_libraries
from cocofl.vector.training.gpu_memory import SmallerCohort, devices_that_fit
from cocofl.vector.training.levels import WHOLE, factor_row
from cocofl.vector.training.optimizer import Adam, Descent, Optimizer, Sgd
from cocofl.vector.training.rules import RuleMemory

__all__ = [
    "PRECISIONS",
    "WHOLE",
    "Adam",
    "Cohort",
    "Descent",
    "DeviceWork",
    "Graphs",
    "Optimizer",
    "Precision",
    "Program",
    "Rows",
    "RuleMemory",
    "Segments",
    "Sgd",
    "SmallerCohort",
    "Source",
    "devices_that_fit",
    "disagreement",
    "factor_row",
    "load_libraries",
    "losses",
    "narrows",
]
