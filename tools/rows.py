"""A row of Table 2 on a GPU that is at hand for minutes: its strategies all at once.

    python3 -m tools.rows mobilenet-cifar10-rc --home HOME --seconds 540

A trial of a few rounds says how long one takes, and so in how many the row ends in time;
``--rounds`` says it instead. The decays are moved along as by ``cocofl reproduce table2 --rounds``,
which also finds the runs, in ``HOME/runs``. What was cut off goes on with the words that are
printed. Results are in ``HOME/runs/table2-there.csv`` as well, for models may be too large to be
brought back.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from cocofl.cli.printing import key_values
from cocofl.engine.executor import Executor
from cocofl.experiment import Run, executor_for, rounds_of
from cocofl.experiment.groups import batch_groups
from cocofl.experiment.runs import play_group
from cocofl.named import vouch_for
from cocofl.reproduction import collection, plans, results
from cocofl.reproduction.collection import Collection
from cocofl.reproduction.plans import Planned
from cocofl.runlog import RoundRecord

STRATEGIES = ("cocofl", "heterofl", "fjord", "fedavg", "fedavg-full")
TRIAL_ROUNDS, SLOW_ROUNDS = 6, 2
"""How many rounds are tried, and how many at first take longer, while kernels are compiled."""
STEP = 20
"""Rounds that are chosen are a multiple of it."""
RARELY = {"evaluation.every": 50}
"""Where rounds are chosen, time goes into rounds rather than into evaluations."""
RESERVE_S, RESERVE_SHARE = 10, 0.03
"""For the start, and for rounds that take longer than those that were tried."""


@dataclass(frozen=True)
class RowRuns:
    """The runs of a table's row: one of each strategy, with one seed."""

    files: Collection
    name: str
    strategies: Sequence[str]
    seed: int
    changes: Mapping[str, Any]

    def planned(self, rounds: int | None) -> list[Planned]:
        """Its runs in so many rounds, else in the paper's."""
        every = plans.table2(self.files, [self.name], self.strategies, self.seed + 1, rounds)
        return [
            replace(one, changes={**one.changes, **self.changes})
            for one in every
            if one.name.seed == self.seed
        ]


@dataclass(frozen=True)
class Pace:
    """How long all runs of a row take together."""

    round_s: float
    evaluation_s: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Pace:
        """From a trial. Of runs that are one computation the first has all the training's time."""
        round_s = evaluation_s = 0.0
        for run in runs:
            timing = run.folder.timing()
            fast = timing[SLOW_ROUNDS:] or timing[-1:]
            # With all data in one place there are fewer rounds, of which a trial is but one.
            share = rounds_of(run.experiment) / run.experiment.rounds
            round_s += share * fmean(line["train_s"] for line in fast)
            evaluation_s += timing[-1]["evaluate_s"]
        return cls(round_s, evaluation_s)

    def seconds(self, rounds: int, every: int) -> float:
        """For so many rounds, with an evaluation after ``every`` so many and at the end."""
        return rounds * self.round_s + -(-rounds // every) * self.evaluation_s

    def rounds_within(self, seconds: float, every: int, most: int) -> int:
        """The most rounds that fit, and a step of them where not even that does."""
        found = min(STEP, most)
        for rounds in (*range(STEP, most, STEP), most):
            if self.seconds(rounds, every) <= seconds:
                found = rounds
        return found


class Progress:
    """Says that it goes on."""

    def __init__(self, runs: int, rounds: int) -> None:
        self._runs, self._rounds, self._begin = runs, rounds, time.perf_counter()

    def on_round(self, record: RoundRecord) -> None:
        """Every tenth round, the first ones, and what the first run was tested for."""
        if record.scores or record.round <= SLOW_ROUNDS or record.round % 10 == 0:
            seconds = time.perf_counter() - self._begin
            where = f"round {record.round}/{self._rounds} of {self._runs} runs"
            say(f"{where}, {seconds:.1f} s", in_short(record.scores))

    def on_end(self) -> None:
        """Nothing more to say."""


def say(*words: str) -> None:
    """At once, also where what is printed is kept in a file."""
    print(*words, flush=True)


def in_short(scores: Mapping[str, Any]) -> str:
    """The numbers of a whole test set.

    >>> in_short({"accuracy": 0.51234, "group_accuracy": {"weak": 0.3}})
    'accuracy 0.5123'
    """
    return ", ".join(f"{k} {v:.4f}" for k, v in scores.items() if isinstance(v, float))


def play(planned: Sequence[Planned], out: Path, executor: Executor) -> list[Run]:
    """Play runs, or go on with them: at once as far as they can be one computation."""
    experiments = {out / str(one.name): one.experiment for one in planned}
    for group in batch_groups(experiments, at_once=sys.maxsize):
        progress = Progress(len(group), rounds_of(next(iter(group.values()))))
        play_group(group, executor, [progress], lambda *_: (), resume=True)
    return [Run.open(path) for path in experiments]


def tried(row: RowRuns, executor: Executor) -> Pace:
    """How long a row takes, from a few rounds of it that are not kept."""
    with tempfile.TemporaryDirectory() as scratch:
        pace = Pace.of(play(row.planned(TRIAL_ROUNDS), Path(scratch), executor))
    say(f"{pace.round_s:.3f} s for a round, {pace.evaluation_s:.2f} s to evaluate all")
    return pace


def play_row(row: RowRuns, home: Path, rounds: int | None, seconds: float) -> list[Run]:
    """Play a row, in as many rounds as fit into the seconds where it is not said in how many."""
    begin = time.perf_counter()
    whole = [one.experiment for one in row.planned(None)]
    for one in whole:
        vouch_for(*one.names())
    with executor_for(whole[0]) as executor:
        if rounds is None:
            pace = tried(row, executor)
            left = seconds - (time.perf_counter() - begin)
            room = left * (1 - RESERVE_SHARE) - RESERVE_S
            every = whole[0].evaluation.every
            rounds = pace.rounds_within(room, every, whole[0].rounds)
            say(
                f"{rounds} rounds of {whole[0].rounds} in the {left:.0f} s that are left; to go on:"
            )
            say(f"the same words and --rounds {rounds} --set evaluation.every={every}")
        played = play(row.planned(rounds), home / "runs", executor)
    for run in played:
        say(run.path.name, in_short(run.final.scores))
    return played


def write_results(files: Collection, runs: Path) -> None:
    """Of all complete runs, as ``cocofl reproduce table2 --also`` reads them."""
    found, left_out = results.find(runs, files, files.rows)
    results.write(runs / "table2-there.csv", found)
    for line in (*left_out, f"written: {runs / 'table2-there.csv'}"):
        say(line)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("row", help="as in experiments/paper, without .toml")
    parser.add_argument("--home", type=Path, required=True, help="where runs/ is, or will be")
    parser.add_argument("--seconds", type=float, help="how long it may take, the trial included")
    parser.add_argument("--rounds", type=int, help="instead of as many as fit into the seconds")
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="+", default=[], action="extend", metavar="KEY=VALUE")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    if asked.rounds is None and asked.seconds is None:
        parser.error("say --seconds or --rounds")
    changes = {
        **({} if asked.rounds else RARELY),
        "engine.kind": "cohort",
        "engine.device": asked.device,
        **key_values(asked.set, "--set", "engine.precision=bf16"),
    }
    files = collection.paper()
    row = RowRuns(files, asked.row, asked.strategies, asked.seed, changes)
    play_row(row, asked.home.absolute(), asked.rounds, asked.seconds or 0.0)
    write_results(files, asked.home.absolute() / "runs")


if __name__ == "__main__":
    main()
