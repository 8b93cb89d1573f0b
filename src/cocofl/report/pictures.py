"""Small pictures in text."""

from __future__ import annotations

from cocofl.span import Role, Span

SIGNS = {Role.FROZEN: "░", Role.TRAINED: "█", Role.PASSING: "▒"}
LEGEND = "░ frozen   █ trained   ▒ frozen, gradients pass"


def chain_picture(span: Span, n_blocks: int) -> str:
    """A chain under a span, one sign per block.

    >>> chain_picture(Span(2, 4), 6)
    '░░██▒▒'
    """
    return "".join(SIGNS[span.role(block)] for block in range(n_blocks))
