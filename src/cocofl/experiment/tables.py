"""The profile tables that an experiment names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from cocofl.budget import Budget
from cocofl.config import Experiment
from cocofl.errors import TableMismatch
from cocofl.fl.codec import is_encoded
from cocofl.fl.trainer import Trainer
from cocofl.freeze.precision import FLOAT32
from cocofl.freeze.state import trained_state
from cocofl.models.widths import check_rolls
from cocofl.profiling import ProfileTable, shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.configurations import Configuration, joined
from cocofl.profiling.parts import first_blocks_table, narrow_end_tables
from cocofl.profiling.subject import Settings
from cocofl.profiling.table import checkpointed_beside, spans_alone
from cocofl.span import Span


class ExperimentTables:
    """The profile tables of an experiment, loaded when a strategy asks; it notes who served."""

    def __init__(
        self,
        experiment: Experiment,
        trainer: Trainer,
        least_budgets: Callable[[], Iterable[Budget]] = tuple,
    ) -> None:
        self._experiment, self._trainer = experiment, trainer
        self.least_budgets = least_budgets
        self.n_blocks = len(trainer.chain())
        self.everything = joined(trainer.chain().learning_blocks)
        facts = trainer.spec.train.facts
        self.is_text, self.labels = facts.task == "text", facts.labels
        self.served: dict[str, str] = {}
        self._loaded: dict[str, ProfileTable] = {}

    def spans(self, variant: str | None = None, precision: str = FLOAT32) -> ProfileTable:
        """The costs of spans; without a variant any table that knows what full training costs."""
        table = self._get(self._experiment.tables.spans, variant or "qff")
        table.check_fits(self.n_blocks)
        table.check_rank(self._trainer.spec.subject.rank)
        if variant is not None and table.variant != variant:
            raise TableMismatch(
                f"{table.name} is for variant {table.variant}, but the strategy freezes with "
                f"{variant}; give tables.spans a table of that variant, or analytic"
            )
        if variant is not None:
            table.check_precision(precision, "tables.spans")
        return table

    def checkpointed(self, variant: str, precision: str = FLOAT32) -> ProfileTable:
        """The costs of spans whose blocks are computed again in the backward pass."""
        spans, source = self.spans(variant, precision), self._experiment.tables.checkpointed
        way_out = "set tables.checkpointed to auto"
        if source == "auto" and (measured := self._checkpointed_beside()) is not None:
            source, way_out = measured, "give that file another name"
        if source == "auto":
            head = not all(isinstance(blocks, Span) for blocks in spans.configurations)
            plain, other = (
                _analytic(*self._counted(variant, head=head, checkpoint=one))
                for one in (False, True)
            )
            table = spans.scaled(plain, other)
            self.served[f"{variant} checkpointed"] = table.describe()
            return table
        table = self._get(source, f"{variant} checkpointed")
        table.check_fits(self.n_blocks)
        if not table.checkpoint or table.variant != variant:
            raise TableMismatch(
                f"{table.name} is not about variant {variant} with trained blocks checkpointed; "
                f"make one with `cocofl profile MODEL --variant {variant} --checkpoint`, or "
                f"{way_out}"
            )
        table.check_precision(precision, "tables.checkpointed")
        return table

    def _checkpointed_beside(self) -> str | None:
        """The table that ``cocofl profile --checkpoint`` puts beside that of spans, if it is there.

        What an experiment says is a path, or a name without ``.json``.
        """
        path = Path(self._experiment.tables.spans)
        other = checkpointed_beside(path)
        return str(other) if path.suffix == ".json" and other.is_file() else None

    def first_blocks(self, variant: str) -> ProfileTable:
        """The costs of the first blocks alone: ``0:1``, ``0:2``, …"""
        return self._as_counted(variant, _first_blocks(*self._counted(variant, self._device)))

    def narrow_ends(self, variant: str) -> dict[float, ProfileTable]:
        """By width, those of spans up to the end, all blocks of which but the first have it."""
        counted = _narrow_ends(*self._counted(variant, self._device))
        return {width: self._as_counted(variant, table) for width, table in counted.items()}

    def _as_counted(self, variant: str, part: ProfileTable) -> ProfileTable:
        """The costs of spans, times what a part of the network is counted to cost beside them."""
        plain = _analytic(*self._counted(variant, self._device))
        spans = spans_alone(self.spans(variant))
        scaled = spans.only(part.configurations).scaled(plain, part)
        table = replace(scaled, name=f"{spans.name}, {part.name} by count")
        self.served[f"{variant} {part.name}"] = table.describe()
        return table

    @property
    def _device(self) -> str:
        """The device whose rates are counted with, where ``tables.spans`` names one."""
        kind, _, device = self._experiment.tables.spans.partition(":")
        return device if kind == "analytic" else ""

    def widths(self) -> ProfileTable:
        """The costs of widths."""
        table = self._get(self._experiment.tables.widths, "width")
        if table.method != "width":
            raise TableMismatch(
                f"{table.name} holds spans; tables.widths needs one made with "
                "`cocofl profile MODEL --method width`"
            )
        return table

    def check_rolls(self) -> None:
        """Complain about a network of which a window of channels cannot roll."""
        trainer, chain = self._trainer, self._trainer.chain()
        assert chain.example is not None
        check_rolls(trainer.model(), trainer.model(self.widths().widths[0]), chain.example)

    def _get(self, source: str, kind: str) -> ProfileTable:
        if kind not in self._loaded:
            table = self._load(source, kind)
            self.served[kind] = table.describe()
            self._loaded[kind] = self._charged(table)
        return self._loaded[kind]

    def _charged(self, table: ProfileTable) -> ProfileTable:
        """The table with the uploads that the experiment's codec makes."""
        codec = self._trainer.codec
        if codec.is_exact:
            return table

        def share(configuration: Configuration) -> float:
            width = configuration if isinstance(configuration, float) else 1.0
            chosen = None if isinstance(configuration, float) else configuration
            chain = self._trainer.chain(width)
            trained = [i for i in range(len(chain)) if chosen is None or i in chosen]
            sent = [item for i in trained for item in trained_state(chain, i).items()]
            sizes = [
                codec.size_bytes(t.shape, t.dtype) if is_encoded(key, t) else t.nbytes
                for key, t in sent
            ]
            return sum(sizes) / sum(t.nbytes for _, t in sent)

        shares = np.array([share(one) for one in table.configurations])
        return replace(table, upload=table.upload * shares)

    def _load(self, source: str, kind: str) -> ProfileTable:
        model = self._experiment.model
        if source == "auto":
            ready = [name for name in shipped() if name.endswith(f"-{model.name}/{kind}")]
            whole = not (model.options or self._trainer.spec.subject.rank)
            source = ready[0] if ready and whole else "analytic"
        kind_of_source, _, device = source.partition(":")
        if kind_of_source != "analytic":
            named = source.startswith("measured:") and "/" not in source
            return ProfileTable.load(f"{source}/{kind}" if named else source)
        return _analytic(*self._counted(kind, device))

    def _counted(
        self, kind: str, device: str = "", *, head: bool = False, checkpoint: bool = False
    ) -> tuple[Settings, str, str]:
        """What is counted where nothing was measured, on which device, and how that is called."""
        method, variant = ("width", "qff") if kind == "width" else ("span", kind)
        subject = self._trainer.spec.subject
        settings = Settings(**vars(subject), method=method, variant=variant)
        settings = replace(settings, head=head, checkpoint=checkpoint)
        words = ["analytic", subject.model, kind, *["checkpointed"] * checkpoint]
        return settings, device or "x64", " ".join([*words, *[f"on {device}"] * bool(device)])


@lru_cache(maxsize=16)
def _first_blocks(settings: Settings, device: str, _name: str) -> ProfileTable:
    return replace(first_blocks_table(settings, device), name="first blocks alone")


@lru_cache(maxsize=16)
def _narrow_ends(settings: Settings, device: str, _name: str) -> dict[float, ProfileTable]:
    tables = narrow_end_tables(settings, device)
    return {width: replace(one, name="narrow ends") for width, one in tables.items()}


@lru_cache(maxsize=16)
def _analytic(settings: Settings, device: str, name: str) -> ProfileTable:
    """Counted once for all runs of a comparison."""
    return replace(analytic_table(settings, device), name=name)
