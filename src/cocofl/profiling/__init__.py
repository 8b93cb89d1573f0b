"""What a device can train: profile tables, how they are measured, predicted or computed."""

from cocofl.profiling.hardware import Hardware
from cocofl.profiling.table import Cost, ProfileTable, shipped

__all__ = ["Cost", "Hardware", "ProfileTable", "shipped"]
