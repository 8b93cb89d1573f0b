"""The figures of profiling are drawn, as PNG and as SVG."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from cocofl import ProfileTable, Span, all_spans
from cocofl.cli.profiling import chain_picture
from cocofl.errors import CocoflError
from cocofl.profiling import Cost
from cocofl.report.drawing import save_profile_figures, trainable_blocks


def spans(variant: str = "qff", factor: float = 1.0) -> ProfileTable:
    costs = {
        span: Cost(len(span) if len(span) == 4 else factor * len(span), None, 100 * len(span), 10)
        for span in all_spans(4)
    }
    return ProfileTable.from_costs(
        costs, n_blocks=4, model="toy", method="span", variant=variant, source="measured"
    )


def widths() -> ProfileTable:
    costs = {w: Cost(w, None, round(100 * w), round(100 * w * w)) for w in (0.25, 0.5, 1.0)}
    return ProfileTable.from_costs(
        costs, n_blocks=4, model="toy", method="width", variant="", source="fast"
    )


def test_both_figures_in_both_formats(tmp_path: Path) -> None:
    tables = [spans(), spans("f", 1.2), widths()]
    written = save_profile_figures(tmp_path / "new" / "toy.png", tables)
    assert [path.name for path in written] == [
        "toy.png", "toy.svg", "toy-blocks.png", "toy-blocks.svg",
    ]  # fmt: skip
    with Image.open(written[0]) as image:
        assert image.size[0] > 1000
    text = written[1].read_text()
    assert text.count("<svg") == 1


def test_other_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CocoflError, match=r"\.png or \.svg"):
        save_profile_figures(tmp_path / "toy.doc", [spans()])


def test_trainable_blocks_grow_with_the_limit() -> None:
    table = spans()
    assert [trainable_blocks(table, limit) for limit in (0.1, 0.25, 0.5, 1.0)] == [0, 4, 4, 4]
    assert trainable_blocks(spans(factor=1.3), 0.3) == 0


def test_the_picture_of_a_chain() -> None:
    assert chain_picture(Span(0, 1), 3) == "█▒▒"
    assert chain_picture(Span(2, 3), 3) == "░░█"
