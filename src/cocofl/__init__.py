"""CoCoFL: federated learning for devices of unequal strength."""

from cocofl.chain import BlockChain, Wiring, split
from cocofl.errors import CannotSplit, CocoflError, InvalidExample, InvalidSpan
from cocofl.span import Role, Span, all_spans

__all__ = [
    "BlockChain",
    "CannotSplit",
    "CocoflError",
    "InvalidExample",
    "InvalidSpan",
    "Role",
    "Span",
    "Wiring",
    "all_spans",
    "split",
]
