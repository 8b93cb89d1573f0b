"""The run folder, the records of rounds in it, and states as files."""

from cocofl.runlog.folder import (
    ABOUT,
    CHECKPOINT,
    EXPERIMENT,
    MODEL,
    PLAN,
    TIMING,
    RunFolder,
    only_writer,
)
from cocofl.runlog.records import (
    FATES,
    METRICS,
    DeviceFigures,
    DeviceRecord,
    Record,
    RoundRecord,
    Scores,
    check_metric_names,
    metric_names,
    scores_by_name,
)
from cocofl.runlog.states import read_state, state_bytes, state_from_bytes

__all__ = [
    "ABOUT",
    "CHECKPOINT",
    "EXPERIMENT",
    "FATES",
    "METRICS",
    "MODEL",
    "PLAN",
    "TIMING",
    "DeviceFigures",
    "DeviceRecord",
    "Record",
    "RoundRecord",
    "RunFolder",
    "Scores",
    "check_metric_names",
    "metric_names",
    "only_writer",
    "read_state",
    "scores_by_name",
    "state_bytes",
    "state_from_bytes",
]
