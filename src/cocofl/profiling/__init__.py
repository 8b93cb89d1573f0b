"""What a device can train: profile tables, how they are measured, predicted or computed."""

from cocofl.profiling.configurations import Cost
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.table import ProfileTable, shipped

__all__ = ["Cost", "Hardware", "ProfileTable", "shipped"]
