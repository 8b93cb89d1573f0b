"""Measure every configuration: in shuffled order, with anchors, and so that it can be continued.

What was measured goes to ``FILE.partial/`` beside the table at once: the workspace, and a journal
with one line per measurement. When all are there the table is written and the folder removed.

A machine gets slower and faster over an hour. Full training is measured again and again as an
anchor; each time is divided by what the anchors around it say, so such drift cancels out, and the
shuffled order keeps what remains from looking like a property of early or late blocks.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cocofl.errors import InvalidSetting
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.measure import measure, prepare_apart
from cocofl.profiling.table import Configuration, Cost, ProfileTable, spans_with_head
from cocofl.profiling.workspace import Settings, load_plan
from cocofl.rng import stream
from cocofl.span import Blocks, Span, all_spans

ANCHOR_EVERY = 10
# The paper's 50 steps, and the levels its baselines use: FjORD's, and those of Transformers.
LEVELS = (0.125, 0.2, 0.4, 0.6, 0.625, 0.8, 0.8125)
STEPS = tuple(round(float(width), 4) for width in np.linspace(0.1, 1.0, 50))
WIDTHS = tuple(sorted({*STEPS, *LEVELS}))

Measure = Callable[[Path, Configuration], Cost]


class Progress(NamedTuple):
    """How far a sweep is."""

    done: int
    total: int
    seconds_left: float


class Entry(NamedTuple):
    """One measurement in the journal."""

    configuration: Configuration
    anchor: bool
    cost: Cost


def configurations_of(settings: Settings, n_blocks: int) -> list[Configuration]:
    """All spans, or all widths."""
    return list(WIDTHS) if settings.method == "width" else [*spans_of(settings, n_blocks)]


def spans_of(settings: Settings, n_blocks: int) -> list[Blocks]:
    """All spans, alone or each with the classifier."""
    return spans_with_head(n_blocks) if settings.head else [*all_spans(n_blocks)]


def sweep(
    settings: Settings,
    out: Path,
    *,
    n_blocks: int,
    configurations: Sequence[Configuration] | None = None,
    measure_one: Measure = measure,
    seed: int = 0,
) -> Iterator[Progress]:
    """Measure what the journal lacks, one configuration per item; then write the table.

    Stop at any point, by Ctrl-C or otherwise, and call it again: it continues.
    """
    folder = out.with_name(out.name + ".partial")
    wanted = list(configurations or configurations_of(settings, n_blocks))
    full: Configuration = 1.0 if settings.method == "width" else Span(0, n_blocks)
    prepare_apart(folder, settings)
    journal = _Journal(folder / "journal.jsonl", settings)
    entries = journal.read()
    found = {entry.configuration for entry in entries if not entry.anchor}
    order = stream(seed, "profiling.sweep").permutation(len(wanted))
    missing = [wanted[i] for i in order if wanted[i] not in found]
    yield Progress(len(wanted) - len(missing), len(wanted), float("nan"))
    begin = time.monotonic()
    for i, configuration in enumerate(missing):
        # The first of a session, then every tenth, and one to end with.
        if i % ANCHOR_EVERY == 0:
            entries.append(journal.add(Entry(full, True, measure_one(folder, full))))
        entries.append(journal.add(Entry(configuration, False, measure_one(folder, configuration))))
        left = (len(missing) - i - 1) * (time.monotonic() - begin) / (i + 1)
        yield Progress(len(wanted) - len(missing) + i + 1, len(wanted), left)
    if missing:
        entries.append(journal.add(Entry(full, True, measure_one(folder, full))))
    choices = load_plan(folder).choices
    table_of(entries, settings, n_blocks, choices).save(out)
    shutil.rmtree(folder)


def table_of(
    entries: Sequence[Entry], settings: Settings, n_blocks: int, choices: dict[str, str]
) -> ProfileTable:
    """The table of a complete journal: medians, freed of the machine's drift."""
    pace = drift(entries)
    anchors = [e.cost.step_s / pace[i] for i, e in enumerate(entries) if e.anchor]
    full: Configuration = 1.0 if settings.method == "width" else Span(0, n_blocks)
    costs: dict[Configuration, Cost] = {}
    for i, entry in enumerate(entries):
        if not entry.anchor:
            step_s = entry.cost.step_s / pace[i]
            if entry.configuration == full:
                step_s = statistics.median([*anchors, step_s])
            costs[entry.configuration] = entry.cost._replace(step_s=float(f"{step_s:.6g}"))
    return ProfileTable.from_costs(
        costs,
        n_blocks=n_blocks,
        model=settings.model,
        method=settings.method,
        variant=settings.variant if settings.method == "span" else "",
        backend=settings.backend if settings.method == "span" else "",
        source="measured",
        batch=settings.batch,
        hardware=Hardware.here(settings.threads, choices),
    )


def drift(entries: Sequence[Entry]) -> list[float]:
    """How slow the machine was at each entry, by the anchors around it; 1 is the median."""
    at = [i for i, entry in enumerate(entries) if entry.anchor]
    if not at:
        return [1.0] * len(entries)
    anchors = [entries[i].cost.step_s for i in at]
    pace = np.interp(range(len(entries)), at, anchors) / statistics.median(anchors)
    return [float(value) for value in pace]


class _Journal:
    """Measurements as they come, one JSON line each."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        facts = {"settings": asdict(settings), "hardware": asdict(Hardware.here(settings.threads))}
        head = json.loads(json.dumps(facts))  # as it will be read: a tuple becomes a list
        if not path.exists():
            path.write_text(json.dumps(head) + "\n")
            return
        found = json.loads(path.read_text().splitlines()[0])
        found["settings"].setdefault("head", False)  # journals of before there was one
        if found != head:
            raise InvalidSetting(
                f"{path.parent} holds measurements of {_differences(found, head)}; remove that "
                "folder to begin anew, or choose another --out"
            )

    def read(self) -> list[Entry]:
        """All measurements so far; a last line that was cut off does not count."""
        entries = []
        whole, _, _cut = self._path.read_text().rpartition("\n")
        for line in whole.splitlines()[1:]:
            key, anchor, *cost = json.loads(line)
            configuration = Blocks.parse(key) if isinstance(key, str) else float(key)
            entries.append(Entry(configuration, bool(anchor), Cost(*cost)))
        self._path.write_text(whole + "\n")
        return entries

    def add(self, entry: Entry) -> Entry:
        """Append a measurement."""
        what = entry.configuration
        key = what if isinstance(what, float) else str(what)
        with self._path.open("a") as file:
            file.write(json.dumps([key, entry.anchor, *entry.cost]) + "\n")
        return entry


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return " and ".join(
        f"{key} {found[part].get(key)!r}, not {value!r}"
        for part in wanted
        for key, value in wanted[part].items()
        if found[part].get(key) != value
    )
