"""CoCoFL: federated learning for devices of unequal strength."""

from cocofl.errors import CocoflError, InvalidSpan
from cocofl.span import Role, Span, all_spans

__all__ = ["CocoflError", "InvalidSpan", "Role", "Span", "all_spans"]
