"""What runs come to: which belong together, curves that hide nothing, who trained what."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from bench.report import made_up_run
from hypothesis import given
from hypothesis import strategies as st

from cocofl.errors import RunFolderProblem
from cocofl.experiment import Spread
from cocofl.report.findings import ahead, curve, summary, thin, trained
from cocofl.report.palette import line_colours
from cocofl.report.runs import Scene, arrange, find_runs


@pytest.fixture(scope="module")
def comparison(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    for split in ("rc", "iid"):
        for strategy in ("cocofl", "heterofl", "centralized"):
            for seed in (0, 1):
                path = folder / split / strategy / f"seed{seed}"
                made_up_run(path, strategy, split, seed, rounds=20)
    made_up_run(folder / "rc" / "tuning" / "cocofl-lr0.1", "cocofl", "rc", 7, rounds=5)
    return folder


@pytest.fixture(scope="module")
def scenes(comparison) -> list[Scene]:
    return arrange(find_runs([comparison]))


def test_a_comparison_is_scenes_of_lines_of_seeds_without_its_tuning(scenes):
    assert [scene.title for scene in scenes] == ["split rc", "split iid"]
    for scene in scenes:
        assert [line.label for line in scene.lines] == ["cocofl", "heterofl", "centralized"]
        assert [[run.experiment.seed for run in line.runs] for line in scene.lines] == [[0, 1]] * 3


def test_runs_given_twice_count_once_and_lines_are_told_apart_by_what_differs(tmp_path):
    made_up_run(tmp_path / "a", "cocofl", "rc", 0, rounds=3)
    made_up_run(tmp_path / "b", "cocofl", "rc", 0, rounds=3)
    file = tmp_path / "b" / "experiment.toml"
    file.write_text(file.read_text().replace("lr = 0.1", "lr = 0.3"))
    runs = find_runs([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert len(runs) == 2
    (scene,) = arrange(runs)
    assert [line.label for line in scene.lines] == ["cocofl, lr 0.1", "cocofl, lr 0.3"]
    assert len(set(line_colours(scene.lines).values())) == 2


def test_of_a_scene_only_what_tells_it_apart_is_said_its_data_first(tmp_path):
    for name, count in (("digits", 30), ("wine", 30), ("wine", 60)):
        path = tmp_path / f"{name}{count}"
        made_up_run(path, "cocofl", "rc", 0, rounds=3)
        file, sized = path / "experiment.toml", "per_round = 10" if name == "digits" else ""
        text = re.sub(r'(?m)^name = "digits"$', f'name = "{name}"', file.read_text())
        text = re.sub(r"(?m)^count = .*$", f"count = {count}", text)
        file.write_text(re.sub(r"(?m)^per_round = .*$", sized or "per_round = 5", text))
    titles = [scene.title for scene in arrange(find_runs([tmp_path]))]
    assert sorted(titles) == ["digits, count 30", "wine, count 30", "wine, count 60"]


def test_the_summary_is_over_seeds(scenes):
    line = scenes[0].lines[0]
    finals = [run.final.scores["accuracy"] for run in line.runs]
    row = summary(line)
    assert row.scores["accuracy"].mean == pytest.approx(np.mean(finals))
    assert row.scores["accuracy"].std == pytest.approx(np.std(finals, ddof=1))
    assert row.updates["merged"] == 20 * 9
    assert row.complete == row.seeds == 2
    assert Spread.of([0.123]).text(scenes[0].metric) == "12.3"


def test_upper_bounds_are_no_rivals(scenes):
    ours, margins = ahead(scenes[0])
    assert (ours.label, list(margins)) == ("cocofl", ["heterofl"])
    assert margins["heterofl"] > 0


def test_a_curve_sums_up_time_and_uploads(scenes):
    line = scenes[0].lines[0]
    one = curve(line)
    totals = [sum(record.bytes_up for record in run.rounds) for run in line.runs]
    assert one.uploaded_mb[-1] == pytest.approx(np.mean(totals) / 1e6)
    assert (np.diff(one.simulated_s) > 0).all()
    assert (one.low <= one.mean).all()
    assert (one.mean <= one.high).all()


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=300, max_size=300), min_size=1, max_size=4),
    st.integers(20, 200),
)
def test_thinning_keeps_every_extreme(rows, at_most):
    series = [np.array(row) for row in rows]
    kept = thin(series, at_most)
    assert len(kept) <= max(at_most, 2 + 2 * len(series))
    assert kept[0] == 0
    assert kept[-1] == 299
    for values in series:
        assert values[kept].max() == values.max()
        assert values[kept].min() == values.min()


def test_who_trained_what(scenes):
    blocks, widths, central = (trained(line, scenes[0].groups) for line in scenes[0].lines)
    assert (blocks.what, len(blocks.columns)) == ("block", 10)
    assert blocks.groups == ("strong", "medium", "weak")
    # Strong devices train everything; weak ones at most three blocks of ten.
    assert blocks.shares[0] == pytest.approx(1)
    assert blocks.shares[2].sum() == pytest.approx(3)
    assert (widths.what, widths.columns) == ("width", ("0.4", "0.6", "1"))
    assert widths.shares == pytest.approx(np.eye(3)[::-1])
    assert central.groups == ("all",)


def test_folders_that_hold_nothing(tmp_path):
    with pytest.raises(RunFolderProblem, match="not a folder"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(RunFolderProblem, match="holds no run"):
        find_runs([tmp_path])
    made_up_run(tmp_path / "new", "cocofl", "rc", 0, rounds=2)
    (tmp_path / "new" / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderProblem, match="nothing to report yet"):
        arrange(find_runs([tmp_path]))
