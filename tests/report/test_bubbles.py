"""The bubble chart: every device and class in its place, in the colour of its group."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from cocofl.report.drawing import MAX_DEVICES_SHOWN, bubble_chart, save_bubble_chart
from cocofl.report.palette import GROUPS as COLOURS
from cocofl.report.sources import Holdings

COUNTS = np.array([[4, 0], [1, 3], [0, 2]])
GROUPS = np.array([1, 0, 1])


def test_bubbles_stand_where_there_are_samples():
    figure = bubble_chart(Holdings(COUNTS, GROUPS, ("a", "b"), ("strong", "weak"), 0), "title")
    (axes,) = figure.axes
    (bubbles,) = axes.collections
    # Devices are sorted by group: 1, then 0 and 2.
    assert bubbles.get_offsets().tolist() == [[0, 0], [0, 1], [1, 0], [2, 1]]
    sizes = bubbles.get_sizes()
    assert sizes / sizes.max() == pytest.approx([1 / 4, 3 / 4, 1, 2 / 4])
    assert len(np.unique(bubbles.get_facecolors(), axis=0)) == 2
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["strong", "weak", "1 samples", "4 samples"]


def test_very_many_devices_are_thinned_and_the_axis_says_so(tmp_path):
    counts = np.ones((5000, 3), np.int64)
    groups = np.arange(5000) % 3
    held = Holdings(counts, groups, ("a", "$", "\n"), tuple("xyz"), 0)
    figure = bubble_chart(held, "title")
    assert len(figure.axes[0].collections[0].get_offsets()) == 3 * MAX_DEVICES_SHOWN
    assert figure.axes[0].get_xlabel() == "device, by group (120 of 5000 shown)"


def test_the_chart_is_a_picture(tmp_path):
    path = tmp_path / "new folder" / "chart.png"
    save_bubble_chart(path, Holdings(COUNTS, GROUPS, ("$a", "\n"), ("strong", "weak"), 0), "title")
    with Image.open(path) as image:
        assert image.format == "PNG"
        colours = {colour for _, colour in image.convert("RGB").getcolors(2**24)}
    assert {tuple(bytes.fromhex(colour[1:])) for colour in COLOURS[:2]} <= colours
