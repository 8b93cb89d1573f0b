"""Which runs a table or a figure needs, and running what is missing.

A run's name says all that sets it apart:
``mobilenet-cifar10-rc__cocofl__seed0`` is the folder of one strategy and seed on one row: flat, and
of plain signs only, so that a folder made on another machine is put beside the others and found.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from cocofl.config import Experiment
from cocofl.engine.rounds import Watcher
from cocofl.errors import DataNotFound, InvalidSetting
from cocofl.experiment import in_short, load_data, simulate_batch
from cocofl.fl.strategies import STRATEGIES, facts_of
from cocofl.fl.strategies.facts import SPANS, WIDTHS
from cocofl.named import lookup
from cocofl.reproduction.collection import Collection, on_one_place
from cocofl.runlog import RunFolder

STRATEGY_ORDER = tuple(
    sorted(
        (name for name in STRATEGIES if facts_of(name).in_paper),
        key=lambda name: facts_of(name).order,
    )
)
"""As in the paper: what could be reached first, then those who obey budgets."""


class OverLimits(NamedTuple):
    """A study of CoCoFL's options at every limit of devices."""

    what: str
    limits: tuple[float, ...]
    options: Mapping[str, Mapping[str, str]]
    """By the heading of their results."""


_SELECTIONS = (
    *product(("random", "round-robin", "min"), ("maximal", "all")),
    ("max", "maximal"),  # the longest feasible span is a maximal one
)
OVER_LIMITS = {
    # The paper says between 0 and 1, and speaks of 0.25 and 0.4. Costs are those of the variant
    # whose table says what fits: that of ``f`` leaves out what is gained.
    "ablation": OverLimits(
        "variants",
        (0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0),
        {
            "f": {"variant": "f", "costs": "f"},
            "ff without gains": {"variant": "ff", "costs": "f"},
            "qff without gains": {"variant": "qff", "costs": "f"},
            "ff with gains": {"variant": "ff", "costs": "ff"},
            "qff with gains": {"variant": "qff", "costs": "qff"},
        },
    ),
    "selectors": OverLimits(
        "selection",
        (0.2, 0.3, 0.4, 0.5),
        {f"{one}+{over}": {"selector": one, "over": over} for one, over in _SELECTIONS},
    ),
}
_NAME = re.compile(r"(.+?)__(.+?)__seed(\d+)(?:__rounds(\d+))?")


class Name(NamedTuple):
    """What a run's folder is called."""

    row: str
    label: str
    """The strategy; behind it what sets this run apart from the row's file."""
    seed: int
    rounds: int | None = None
    """Where they are fewer than the row's."""

    def __str__(self) -> str:
        shorter = f"__rounds{self.rounds}" if self.rounds else ""
        return f"{self.row}__{self.label}__seed{self.seed}{shorter}"

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """From a folder's name; None for one that is no run of ours.

        >>> Name.parse("mobilenet-cifar10-rc__cocofl__seed0__rounds50")
        Name(row='mobilenet-cifar10-rc', label='cocofl', seed=0, rounds=50)
        """
        found = _NAME.fullmatch(text)
        if found is None:
            return None
        row, label, seed, rounds = found.groups()
        return cls(row, label, int(seed), int(rounds) if rounds else None)


@dataclass(frozen=True)
class Planned:
    """One run: its name, its file, and what it changes of it."""

    name: Name
    file: Path
    changes: Mapping[str, Any]

    @property
    def experiment(self) -> Experiment:
        """What is to be run."""
        return Experiment.load(self.file, self.changes)

    def command(self, out: Path) -> str:
        """How to start this one run by itself, here or elsewhere."""
        sets = [word for key, value in self.changes.items() for word in ("--set", f"{key}={value}")]
        words = ["cocofl", "run", str(self.file), *sets, "--out", str(out / str(self.name))]
        return shlex.join([*words, "--resume", "--no-report"])


def table2(
    collection: Collection,
    rows: Sequence[str],
    strategies: Sequence[str],
    seeds: int,
    rounds: int | None = None,
    spans: str | None = None,
    widths: str | None = None,
) -> list[Planned]:
    """Every strategy with every seed on every row.

    With a table of one's own (a file, ``analytic``, or the name of one that ships) CoCoFL
    (``spans``) or HeteroFL and FjORD (``widths``) run with it as well. A row's run with all data
    in one place is that of the iid row of the same network and data.
    """
    for name in strategies:
        lookup(name, STRATEGIES, "strategy", InvalidSetting)
    for row in rows:
        collection.file(row)  # before a word of the row that all data in one place needs
    own = {SPANS: ("tables.spans", spans), WIDTHS: ("tables.widths", widths)}
    found: dict[Name, Planned] = {}
    for row in rows:
        for strategy in strategies:
            facts = facts_of(strategy)
            place = on_one_place(row) if facts.all_data_in_one_place else row
            labelled: dict[str, dict[str, Any]] = {strategy: {}}
            key, table = own.get(facts.tables, ("", None))
            if table is not None:
                absolute = str(Path(table).resolve()) if Path(table).is_file() else table
                labelled[f"{strategy}.{_table_name(table)}"] = {key: absolute}
            for label, tables in labelled.items():
                changes = {"strategy.name": strategy, **tables}
                for one in _seeded(collection, place, label, changes, seeds, rounds):
                    found.setdefault(one.name, one)
    return list(found.values())


def strategy_of(label: str) -> str:
    """The strategy of a run on a row; behind it may stand the table that it used.

    >>> strategy_of("cocofl.x64_mobilenet"), strategy_of("fedavg-full")
    ('cocofl', 'fedavg-full')
    """
    return label.partition(".")[0]


def over_limits(
    collection: Collection,
    study: str,
    limits: Sequence[float],
    seeds: int,
    rounds: int | None = None,
) -> list[Planned]:
    """Every choice of options that a study in :data:`OVER_LIMITS` has, at every limit."""
    planned: list[Planned] = []
    for limit, options in product(limits, OVER_LIMITS[study].options.values()):
        # One way to say each experiment, so that a run of one study is found by another.
        defaults = {"variant": "qff", "selector": "random", "over": "maximal"}
        defaults["costs"] = options.get("variant", "qff")
        changes = {f"strategy.{k}": v for k, v in options.items() if v != defaults[k]}
        changes = {"devices.groups": f"limited:{limit:g}", **changes}
        label = limited_label(limit, **options)
        planned += _seeded(collection, collection.ablation, label, changes, seeds, rounds)
    return planned


def limited_label(
    limit: float,
    *,
    variant: str = "qff",
    costs: str = "",
    selector: str = "random",
    over: str = "maximal",
) -> str:
    """The label of an ablation's run: what is not CoCoFL's own way is named.

    >>> limited_label(0.25), limited_label(0.3, variant="ff", costs="f")
    ('limit0.25-qff', 'limit0.3-ff-as-f')
    >>> limited_label(0.2, selector="min", over="all")
    'limit0.2-qff-min-all'
    """
    parts = [f"limit{limit:g}", variant]
    parts += ["as", costs] if costs not in ("", variant) else []
    parts += [selector, over] if (selector, over) != ("random", "maximal") else []
    return "-".join(parts)


def label_of(experiment: Experiment) -> str | None:
    """The label that an ablation's run should have; None for one that is no such run."""
    groups, options = experiment.devices.groups, experiment.strategy.options
    limit = str(groups).removeprefix("limited:")
    try:
        return limited_label(float(limit), **options)
    except (TypeError, ValueError):
        return None


def shortened(experiment: Experiment, rounds: int | None) -> dict[str, Any]:
    """What changes with fewer rounds: the learning rate decays at the same share of them."""
    if rounds is None or rounds == experiment.rounds:
        return {}
    decays = [
        max(1, decay * rounds // experiment.rounds) for decay in experiment.training.decay_rounds
    ]
    return {"rounds": rounds, "training.decay_rounds": decays}


def _seeded(
    collection: Collection,
    row: str,
    label: str,
    changes: Mapping[str, Any],
    seeds: int,
    rounds: int | None,
) -> Iterator[Planned]:
    file, shorter = collection.file(row), shortened(collection.experiment(row), rounds)
    for seed in range(seeds):
        name = Name(row, label, seed, rounds if shorter else None)
        yield Planned(name, file, {**changes, "seed": seed, **shorter})


def _table_name(table: str) -> str:
    """A table as a part of a folder's name.

    >>> _table_name("tables/x64_mobilenet.json"), _table_name("measured:epyc-cnn/width")
    ('x64_mobilenet', 'measured-epyc-cnn-width')
    """
    if table.endswith(".json"):
        return Path(table).stem
    return table.replace(":", "-").replace("/", "-")


def missing(planned: Sequence[Planned], out: Path) -> list[Planned]:
    """Those that have not been run to their end."""
    return [one for one in planned if not RunFolder(out / str(one.name)).is_complete]


def play(
    planned: Sequence[Planned],
    out: Path,
    *,
    watchers: Sequence[Watcher] = (),
    announce: Callable[[str, int], None] = lambda _name, _rounds: None,
) -> list[str]:
    """Run what is missing, continue what was interrupted; why some could not be run.

    An interrupted run may have been begun on another machine.
    """
    todo, problems = _with_data(missing(planned, out))
    if not todo:
        return problems
    experiments = {out / str(one.name): one.experiment for one in todo}

    def say(paths: Sequence[Path], rounds: int) -> None:
        announce(in_short([path.name for path in paths]), rounds)

    simulate_batch(experiments, resume=True, watchers=watchers, announce=say)
    return problems


def _with_data(planned: Sequence[Planned]) -> tuple[list[Planned], list[str]]:
    """Those whose data is here, and one line for each row of which it is not."""
    problems: dict[str, str] = {}
    firsts: dict[str, Planned] = {}
    for one in planned:
        firsts.setdefault(one.name.row, one)
    for row, first in firsts.items():
        try:
            load_data(first.experiment)
        except DataNotFound as error:
            problems[row] = f"{row} was not run: {error}"
    return [one for one in planned if one.name.row not in problems], list(problems.values())
