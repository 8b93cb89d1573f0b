"""All that a metric of one's own is made of. ``docs/guides/extend-parts.md`` shows an example."""

from cocofl.fl.metrics import METRICS, Metric, Sums, confusion

__all__ = ["METRICS", "Metric", "Sums", "confusion"]
