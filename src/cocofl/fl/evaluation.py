"""When and how the server tests its model."""

from __future__ import annotations

from dataclasses import dataclass

from cocofl.checks import check_choice, check_number

STATISTICS = ("running", "batch")


@dataclass(frozen=True)
class Evaluation:
    """The section ``[evaluation]`` of an experiment."""

    every: int = 5
    batch: int = 256
    statistics: str = "running"
    """BatchNorm's: those that training left (``running``), or those of each test ``batch``."""
    metrics: tuple[str, ...] = ("accuracy", "f1")
    """What the model is judged by: names, or one's own as ``package.module:function``."""

    def __post_init__(self) -> None:
        check_number("evaluation.every", self.every, least=1)
        check_number("evaluation.batch", self.batch, least=1)
        check_choice("evaluation.statistics", self.statistics, STATISTICS)
