"""Colours: Okabe and Ito's, told apart by every kind of colour vision."""

from __future__ import annotations

from collections.abc import Sequence

from cocofl.report.runs import Line

GROUPS = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

KIND_COLOURS = {"qff": "#0072B2", "ff": "#009E73", "f": "#E69F00", "width": "#D55E00"}
"""Of profile tables, by their kind."""

# For strategies that declare no colour.
_SPARE = ("#56B4E9", "#8B5CF6", "#A16207", "#0F766E", "#BE185D", "#4D7C0F")

ON_DARK = {
    "#0072B2": "#4AA8E0",
    "#D55E00": "#FF8A3D",
    "#CC79A7": "#E09CC4",
    "#E69F00": "#F2BC45",
    "#009E73": "#3CC49B",
    "#6B7280": "#A8B0BD",
    "#8B5CF6": "#B196FA",
    "#A16207": "#D9A441",
    "#0F766E": "#45B8AD",
    "#BE185D": "#F472A6",
    "#4D7C0F": "#9BCB55",
    "#000000": "#D8DCE3",
}
"""What each colour becomes on a dark page, where it would be hard to see."""


def line_colours(lines: Sequence[Line]) -> dict[str, str]:
    """A colour for each line by its label."""
    colours: dict[str, str] = {}
    for line in lines:
        own = line.facts.colour
        free = [colour for colour in (own, *_SPARE) if colour and colour not in colours.values()]
        colours.setdefault(line.label, free[0] if free else _SPARE[len(colours) % len(_SPARE)])
    return colours


def group_colour(index: int) -> str:
    """The colour of a device group."""
    return GROUPS[index % len(GROUPS)]
