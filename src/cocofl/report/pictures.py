"""Small pictures in text."""

from __future__ import annotations

from cocofl.span import Blocks, Role

SIGNS = {Role.FROZEN: "░", Role.TRAINED: "█", Role.PASSING: "▒"}
LEGEND = "░ frozen   █ trained   ▒ frozen, gradients pass"


def chain_picture(trained: Blocks, n_blocks: int) -> str:
    """A chain of which some blocks are trained, one sign per block.

    >>> chain_picture(Blocks("2:4+5:6"), 6)
    '░░██▒█'
    """
    return "".join(SIGNS[role] for role in trained.roles(n_blocks))
