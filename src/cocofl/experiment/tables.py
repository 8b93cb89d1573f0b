"""The profile tables that an experiment names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from cocofl.config import Experiment
from cocofl.errors import TableMismatch
from cocofl.profiling import ProfileTable, shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.subject import Subject
from cocofl.profiling.workspace import Settings


class ExperimentTables:
    """The profile tables of an experiment, loaded when a strategy asks; it notes who served."""

    def __init__(
        self, experiment: Experiment, subject: Subject, n_blocks: int, *, is_text: bool
    ) -> None:
        self._experiment, self._subject = experiment, subject
        self.n_blocks, self.is_text = n_blocks, is_text
        self.served: dict[str, str] = {}
        self._loaded: dict[str, ProfileTable] = {}

    def spans(self, variant: str | None = None) -> ProfileTable:
        """The costs of spans; without a variant any table that knows what full training costs."""
        table = self._get(self._experiment.tables.spans, variant or "qff")
        table.check_fits(self.n_blocks)
        if variant is not None and table.variant != variant:
            raise TableMismatch(
                f"{table.name} is for variant {table.variant}, but the strategy freezes with "
                f"{variant}; give tables.spans a table of that variant, or analytic"
            )
        return table

    def widths(self) -> ProfileTable:
        """The costs of widths."""
        table = self._get(self._experiment.tables.widths, "width")
        if table.method != "width":
            raise TableMismatch(
                f"{table.name} holds spans; tables.widths needs one made with "
                "`cocofl profile MODEL --method width`"
            )
        return table

    def _get(self, source: str, kind: str) -> ProfileTable:
        if kind not in self._loaded:
            self._loaded[kind] = table = self._load(source, kind)
            self.served[kind] = table.describe()
        return self._loaded[kind]

    def _load(self, source: str, kind: str) -> ProfileTable:
        model = self._experiment.model
        if source == "auto":
            ready = [name for name in shipped() if name.endswith(f"-{model.name}/{kind}")]
            source = ready[0] if ready and not model.options else "analytic"
        if source != "analytic":
            named = source.startswith("measured:") and "/" not in source
            return ProfileTable.load(f"{source}/{kind}" if named else source)
        method, variant = ("width", "qff") if kind == "width" else ("span", kind)
        subject = self._subject
        settings = Settings(
            subject.model,
            method,
            variant,
            batch=subject.batch,
            num_classes=subject.num_classes,
            options=subject.options,
        )
        return _analytic(settings, f"analytic {model.name} {kind}")


@lru_cache(maxsize=16)
def _analytic(settings: Settings, name: str) -> ProfileTable:
    """Counted once for all runs of a comparison."""
    return replace(analytic_table(settings), name=name)
