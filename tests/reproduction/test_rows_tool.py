"""A row of a table is played at once, in as many rounds as fit into some seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import rows
from tools.rows import Pace, RowRuns

from cocofl.experiment import Run
from cocofl.reproduction import results
from cocofl.reproduction.collection import Collection

TINY = """
name = "tiny-iid"
rounds = 100
model = {options = {tiny = true}}
data = {split = "iid"}
devices = {count = 6, per_round = 3}
training = {decay_rounds = [60]}
evaluation = {every = 50}
engine = {kind = "cohort", device = "cpu", kernels = "reference"}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Collection:
    (tmp_path / "tiny-iid.toml").write_text(TINY)
    return Collection(tmp_path, ("tiny-iid",))


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        (-1, 20),  # however little time there is
        (50, 20),
        (90, 40),  # 40 rounds and an evaluation at their end
        (89, 20),
        (140, 60),  # two evaluations, after 50 rounds and at the end
        (1e9, 110),  # the paper's, of whatever they are a multiple
    ],
)
def test_as_many_rounds_as_fit(seconds: float, rounds: int) -> None:
    assert Pace(round_s=2, evaluation_s=10).rounds_within(seconds, every=50, most=110) == rounds


def test_a_row_of_few_rounds_is_not_lengthened() -> None:
    assert Pace(round_s=2, evaluation_s=10).rounds_within(1e9, every=50, most=8) == 8


@pytest.mark.slow
def test_a_row_is_tried_played_and_found_again(
    tiny: Collection, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    row = RowRuns(tiny, "tiny-iid", ["cocofl", "fedavg"], 0, {"evaluation.every": 10})
    played = rows.play_row(row, home, rounds=None, seconds=0)
    names = [f"tiny-iid__{strategy}__seed0__rounds20" for strategy in row.strategies]
    assert [run.path for run in played] == [home / "runs" / name for name in names]
    for run in played:
        assert run.folder.is_complete
        assert run.experiment.training.decay_rounds == (12,)
        assert [one.round for one in run.evaluated] == [10, 20]
        assert run.folder.about["together"] == [str(one.path) for one in played]
    printed = capsys.readouterr().out
    assert "the same words and --rounds 20 --set evaluation.every=10" in printed
    assert "round 6/6 of 2 runs" in printed
    assert "round 20/20 of 2 runs" in printed

    again = rows.play_row(row, home, rounds=20, seconds=0)
    assert again == played
    assert "of 2 runs" not in capsys.readouterr().out
    rows.write_results(tiny, home / "runs")
    found = results.read(home / "runs/table2-there.csv")
    assert {one.strategy for one in found} == {"cocofl", "fedavg"}
    assert {one.rounds for one in found} == {20}


def test_another_seed_and_what_a_trial_says(tiny: Collection, tmp_path: Path) -> None:
    row = RowRuns(tiny, "tiny-iid", ["fedavg"], 3, {"training.lr": 0.2})
    (planned,) = row.planned(None)
    assert str(planned.name) == "tiny-iid__fedavg__seed3"
    assert planned.experiment.training.lr == 0.2
    run = tmp_path / "run"
    run.mkdir()
    (run / "experiment.toml").write_text(planned.experiment.to_toml())
    seconds = zip((9, 5, 1, 3), (0, 0, 0, 7), strict=True)
    lines = [f'{{"train_s": {train}, "evaluate_s": {test}}}\n' for train, test in seconds]
    (run / "timing.jsonl").write_text("".join(lines))
    assert Pace.of([Run.open(run)] * 2) == Pace(round_s=4, evaluation_s=14)
