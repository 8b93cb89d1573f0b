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

from cocofl.checks import Amount, check_of
from cocofl.errors import InvalidSetting
from cocofl.files import append_text, parsed_json, read_limited, write_text
from cocofl.profiling.configurations import Configuration, Cost
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.measure import Measurement, measure, prepare_apart
from cocofl.profiling.subject import WIDTHS, Settings, load_plan, load_settings
from cocofl.rng import stream
from cocofl.span import Blocks

ANCHOR_EVERY = 10

_BEGIN_ANEW = "remove that folder to begin anew, or choose another --out"

Measure = Callable[[Path, Configuration], Measurement]


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
    process_bytes: int | None


def sweep(
    settings: Settings,
    out: Path,
    *,
    n_blocks: int,
    learning: Sequence[int] | None = None,
    measure_one: Measure = measure,
) -> Iterator[Progress]:
    """Measure what the journal lacks, one configuration per item; then write the table.

    Stop at any point, by Ctrl-C or otherwise, and call it again: it continues. ``learning`` are the
    blocks that have something to learn, where not all have.
    """
    folder = out.with_name(out.name + ".partial")
    spans = settings.method == "span"
    blocks = range(n_blocks) if learning is None else learning
    wanted: list[Configuration] = [*(settings.spans(blocks) if spans else WIDTHS)]
    full = settings.full(n_blocks)
    prepare_apart(folder, settings)
    journal = folder / "journal.jsonl"
    entries = _read_journal(journal, settings)

    def note(configuration: Configuration, *, anchor: bool) -> None:
        entry = Entry(configuration, anchor, *measure_one(folder, configuration))
        entries.append(entry)
        append_text(journal, json.dumps(entry, default=str) + "\n")

    found = {entry.configuration for entry in entries if not entry.anchor}
    order = stream(0, "profiling.sweep").permutation(len(wanted))
    missing = [wanted[i] for i in order if wanted[i] not in found]
    done = len(wanted) - len(missing)
    yield Progress(done, len(wanted), float("nan"))
    begin = time.monotonic()
    for i, configuration in enumerate(missing, 1):
        # The first of a session, then every tenth, and one to end with.
        if i % ANCHOR_EVERY == 1:
            note(full, anchor=True)
        note(configuration, anchor=False)
        left = (len(missing) - i) * (time.monotonic() - begin) / i
        yield Progress(done + i, len(wanted), left)
    if missing:
        note(full, anchor=True)
    hardware = Hardware.here(settings.threads, load_plan(folder).choices)
    facts = {"hardware": hardware, "process_bytes": _process_bytes(entries)}
    settings.table(_costs(entries, full), n_blocks, source="measured", **facts).save(out)
    shutil.rmtree(folder)


def _costs(entries: Sequence[Entry], full: Configuration) -> dict[Configuration, Cost]:
    """What a complete journal says, freed of the machine's drift; medians of the anchors."""
    steady = [
        entry._replace(cost=entry.cost._replace(step_s=entry.cost.step_s / pace))
        for entry, pace in zip(entries, drift(entries), strict=True)
    ]
    costs = {entry.configuration: entry.cost for entry in steady if not entry.anchor}
    of_full = [entry.cost for entry in steady if entry.configuration == full]
    # Of adapters full training is not among what is wanted, and its first anchor stands for it.
    whole = costs.get(full, of_full[0])
    full_s = statistics.median(cost.step_s for cost in of_full)
    rss = [cost.rss_bytes for cost in of_full if cost.rss_bytes is not None]
    full_rss = round(statistics.median(rss)) if rss else None
    return costs | {full: whole._replace(step_s=full_s, rss_bytes=full_rss)}


def _process_bytes(entries: Sequence[Entry]) -> int | None:
    """What a process holds before it trains; that differs a little from one to the next."""
    known = [entry.process_bytes for entry in entries if entry.process_bytes is not None]
    return round(statistics.median(known)) if known else None


def drift(entries: Sequence[Entry]) -> list[float]:
    """How slow the machine was at each entry, by the anchors around it; 1 is the median."""
    at = [i for i, entry in enumerate(entries) if entry.anchor]
    if not at:
        return [1.0] * len(entries)
    anchors = [entries[i].cost.step_s for i in at]
    pace = np.interp(range(len(entries)), at, anchors) / statistics.median(anchors)
    return [float(value) for value in pace]


_is_entry = check_of(tuple[str | float, bool, tuple[Amount, int | None, int, int], int | None])


def _read_journal(path: Path, settings: Settings) -> list[Entry]:
    """What was measured so far, one JSON line each; a last line that was cut off is dropped."""
    facts = {"settings": asdict(settings), "hardware": asdict(Hardware.here(settings.threads))}
    head = json.loads(json.dumps(facts))  # as it will be read: a tuple becomes a list
    if not path.exists():
        write_text(path, json.dumps(head) + "\n")
    try:
        whole, _, _cut = read_limited(path).decode().rpartition("\n")
        first, *lines = whole.splitlines()
        found, measured = parsed_json(first), [parsed_json(line) for line in lines]
        # Journals of before there was one lack it.
        for key in ("head", "rank", "alpha", "checkpoint", "precision"):
            found["settings"].setdefault(key, head["settings"][key])
        known = {part: dict(found[part]) for part in head}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidSetting(f"{path} is no journal: {error}; {_BEGIN_ANEW}") from error
    # What is measured is what the workspace says, so that must not say anything else.
    if known != head or load_settings(path.parent) != settings:
        differences = _differences(known, head) or "something else"
        raise InvalidSetting(f"{path.parent} holds measurements of {differences}; {_BEGIN_ANEW}")
    write_text(path, whole + "\n")
    entries = []
    for number, line in enumerate(measured, start=2):
        if not _is_entry(line):
            raise InvalidSetting(f"{path}, line {number}, is no measurement; {_BEGIN_ANEW}")
        key, anchor, cost, process_bytes = line
        configuration = Blocks.parse(key) if isinstance(key, str) else float(key)
        entries.append(Entry(configuration, anchor, Cost(*cost), process_bytes))
    return entries


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return " and ".join(
        f"{key} {found[part].get(key)!r}, not {value!r}"
        for part in wanted
        for key, value in wanted[part].items()
        if found[part].get(key) != value
    )
