"""Methods in the order of what they reach, and what that takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench.report import made_up_run

from cocofl.report.findings import WORST, curve, known_axes, summary
from cocofl.report.ranking import overall_table, places, ranked, ranking_table
from cocofl.report.runs import Scene, arrange, find_runs
from cocofl.report.writing import write_report

METHODS = ("cocofl", "heterofl", "fjord", "fedavg", "centralized")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> list[Scene]:
    folder = tmp_path_factory.mktemp("league")
    for split in ("rc", "iid"):
        for strategy in METHODS:
            made_up_run(folder / split / strategy, strategy, split, 0, rounds=20)
    return arrange(find_runs([folder]))


def column(table, name: str) -> list[str]:
    return [line[table.header.index(name)] for line in table.lines]


def test_the_best_of_those_who_obey_budgets_is_first(scenes):
    table = ranking_table(scenes[0])
    assert table is not None
    assert sorted(column(table, "strategy")) == sorted(set(METHODS) - {"centralized"})
    found = [float(text) for text in column(table, "accuracy / %")]
    assert found == sorted(found, reverse=True)
    assert column(table, "rank") == ["1", "2", "3", "4"]


def test_who_is_equally_good_has_the_same_place(scenes):
    first, second, third, _ = ranked(scenes[0])
    assert places([first, second, second, third]) == [1, 2, 2, 4]


def test_what_it_takes_is_counted_until_the_goal_is_first_reached(scenes):
    (best, *_), table = ranked(scenes[0]), ranking_table(scenes[0])
    assert table is not None
    goal = np.floor(90 * summary(best).scores["accuracy"].mean) / 100
    (heading,) = [name for name in table.header if name.startswith("uploaded to")]
    assert heading == f"uploaded to {100 * goal:.1f} %"
    for line, text in zip(ranked(scenes[0]), column(table, heading), strict=True):
        reached = np.flatnonzero(curve(line).mean >= goal)
        assert (text == "–") == (len(reached) == 0)
    assert column(table, heading)[0] != "–"


def test_who_took_part_is_said_by_group(scenes):
    table = ranking_table(scenes[0])
    assert table is not None
    run = ranked(scenes[0])[0].runs[0]
    weak = [one.fate for record in run.rounds for one in record.devices if one.group == "weak"]
    share = 100 * weak.count("merged") / len(weak)
    assert column(table, "weak took part / %")[0] == f"{share:.0f}"
    groups = [name.split()[0] for name in table.header if "took part" in name]
    assert groups == ["strong", "medium", "weak"], "the strongest first, as everywhere"


def test_places_are_averaged_over_scenes(scenes):
    table = overall_table(scenes)
    assert table is not None
    for line in table.lines:
        assert float(line[1]) == pytest.approx(np.mean([float(place) for place in line[2:]]))
    assert [line[1] for line in table.lines] == sorted(line[1] for line in table.lines)


def test_few_methods_need_no_ranking(tmp_path: Path):
    for strategy in ("cocofl", "fedavg"):
        made_up_run(tmp_path / strategy, strategy, "rc", 0, rounds=3)
    few = arrange(find_runs([tmp_path]))
    assert ranking_table(few[0]) is None
    assert overall_table(few) is None


def test_energy_counts_where_power_is_known(scenes, tmp_path: Path):
    for strategy in METHODS:
        path = tmp_path / strategy
        made_up_run(path, strategy, "rc", 0, rounds=20)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        known = strategy != "centralized"  # one place has no devices with a battery
        text = "".join(
            f"{json.dumps(row | ({'energy_j': 2.5} if known else {}))}\n" for row in rows
        )
        (path / "metrics.jsonl").write_text(text)
    (scene,) = arrange(find_runs([tmp_path]))
    curves = [curve(line) for line in scene.lines]
    assert [*known_axes(scene.lines, curves)][-1] == "energy_j"
    unknown = [curve(line) for line in scenes[0].lines]
    assert "energy_j" not in known_axes(scenes[0].lines, unknown)
    table, best = ranking_table(scene), curve(ranked(scene)[0])
    assert table is not None
    (heading,) = [name for name in table.header if name.startswith("energy to")]
    goal = float(heading.split()[2]) / 100
    first = best.rounds[np.flatnonzero(best.mean >= goal)[0]]
    assert column(table, heading)[0] == f"{2.5 * first:.3g} J"
    assert (best.of(WORST) == np.min(list(best.groups.values()), axis=0)).all()
    page = write_report(find_runs([tmp_path]), tmp_path / "page.html").read_text()
    assert "of the worst-off group over energy" in page
