"""What a device can train: profile tables, how they are measured, predicted or computed."""

from cocofl.profiling.table import Cost, Hardware, ProfileTable, shipped

__all__ = ["Cost", "Hardware", "ProfileTable", "shipped"]
