"""Experiment files, one per row of a table, and what was published of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cocofl.config import Experiment
from cocofl.errors import InvalidSetting
from cocofl.experiment import Spread
from cocofl.files import read_csv
from cocofl.named import nearest

PUBLISHED = "published.csv"
_ABLATION = "ablation"

# Beside the package in a wheel, at the root of a source tree.
_PLACES = (Path(__file__).parents[1] / "experiments", Path(__file__).parents[3] / "experiments")

Key = tuple[str, str, str]
"""Row, strategy, and which value: accuracy, f1, or the accuracy of a group."""


@dataclass(frozen=True)
class Collection:
    """A folder of experiment files, each a row of a table."""

    folder: Path
    rows: tuple[str, ...]
    published: Mapping[Key, Spread] = field(default_factory=dict)

    def file(self, row: str) -> Path:
        """The experiment of a row."""
        path = self.folder / f"{row}.toml"
        if not path.is_file():
            raise InvalidSetting(
                f"there is no row {row}{nearest(row, self.rows)}; there are: {', '.join(self.rows)}"
            )
        return path

    def experiment(self, row: str) -> Experiment:
        """What a row's file says."""
        return Experiment.load(self.file(row))

    @property
    def ablation(self) -> str:
        """The file in which the ablations vary limits, variants and selection."""
        (found,) = (path.stem for path in self.folder.glob("*.toml") if is_ablation(path.stem))
        return found

    def metric(self, row: str) -> str:
        """What the paper reports of a row: accuracy, or F1 where classes are unbalanced."""
        values = {value for known, _, value in self.published if known == row}
        return "f1" if "f1" in values else "accuracy"


def is_ablation(row: str) -> bool:
    """Whether runs are told apart by limit, variant and selection, not by strategy.

    >>> is_ablation("ablation-fashion_mnist"), is_ablation("mobilenet-cifar10-rc")
    (True, False)
    """
    return row.partition("-")[0] == _ABLATION


def on_one_place(row: str) -> str:
    """The row whose run with all data in one place stands for this one: any split is the same.

    >>> on_one_place("mobilenet-cifar10-rc")
    'mobilenet-cifar10-iid'
    """
    return f"{row.rpartition('-')[0]}-iid"


@cache
def paper() -> Collection:
    """The rows of the paper's Table 2, in its order, with its numbers."""
    folder = _find("paper")
    published = _read_published(folder / PUBLISHED)
    return Collection(folder, tuple(dict.fromkeys(row for row, _, _ in published)), published)


@cache
def small() -> Collection:
    """The same question at a size for two CPU cores; nothing was published of it."""
    folder = _find("small")
    files = sorted(path.stem for path in folder.glob("*.toml"))
    return Collection(folder, tuple(row for row in files if not is_ablation(row)))


def _find(name: str) -> Path:
    for place in _PLACES:
        if (place / name).is_dir():
            return place / name
    raise InvalidSetting(
        f"the experiment files are not here: there is no folder {name} in "
        f"{' or '.join(map(str, _PLACES))}"
    )


def _read_published(path: Path) -> dict[Key, Spread]:
    try:
        return {
            (line["row"], line["strategy"], line["value"]): Spread(
                float(line["mean"]) / 100, float(line["std"]) / 100 if line["std"] else None
            )
            for line in read_csv(path)
        }
    except (OSError, ValueError, KeyError) as error:
        raise InvalidSetting(f"{path} is no list of published values: {error}") from error
