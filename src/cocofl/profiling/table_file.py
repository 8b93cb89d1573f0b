"""The file of a profile table. It is read and written here and nowhere else.

A table file is JSON::

    {
     "format": "cocofl profile table 1",
     "model": "mobilenet",
     "method": "span",                    // or "width"
     "variant": "qff", "backend": "auto", // of the frozen blocks; "" for widths
     "source": "measured",                // "fast": partly predicted, "analytic": not measured
     "n_blocks": 20, "batch": 32,
     "hardware": {"cpu": "…", "threads": 2, "torch": "2.13.0", "plan": "1a2b3c4d"},
     "process_bytes": 378000000,          // beside all that follows; null if nobody knows
     "error": {"time_median": 0.02, …},   // of predictions, as fractions; empty if measured
     "columns": ["start", "stop", "step_s", "rss_bytes", "tensor_bytes", "upload_bytes"],
     "rows": [[0, 1, 0.0712, 71234304, 61234176, 14620], …],
     "checksum": "…"                      // of all that; leave it out of a table made by hand
    }

``step_s`` is the time of one mini-batch. Memory is what training adds to a process that has
imported everything and loaded model and data: ``rss_bytes`` is the peak of resident memory above
that process (``null`` where it was not measured), ``tensor_bytes`` the peak of live tensor bytes.
What such a process holds by itself is ``process_bytes``. Tables of before have no such key, and
their ``rss_bytes`` count a part of the process, about 100 MB, in every row.

A width table has ``width`` in place of ``start`` and ``stop``, and a table with sets of blocks that
have gaps has ``blocks``, a text like ``"2:4+19:20"``. The row that trains every block (0:n_blocks,
or width 1) is what fractions refer to.

A table of low-rank adapters has their ``rank``, rows of blocks that have some, and as ``full`` the
costs of training every block whole: so a share of full training means the same in all tables. So
has one with ``"checkpoint": true``, of trained blocks that are computed again in the backward pass,
and one with ``"precision": "bfloat16"``, of trained blocks that are computed so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import combinations, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cocofl.checks import Check, check_of, in_short
from cocofl.errors import InvalidSpan, InvalidTable
from cocofl.files import parsed_json, read_limited, write_text
from cocofl.freeze.precision import FLOAT32
from cocofl.profiling.configurations import (
    Configuration,
    Cost,
    joined,
    spans_with_head,
)
from cocofl.profiling.hardware import Hardware
from cocofl.span import MOST_BLOCKS, Blocks, Span

FORMAT = "cocofl profile table 1"
METHODS = ("span", "width")
SOURCES = ("measured", "fast", "analytic", "published")
PUBLISHED_BATCH = 32  # the paper's, for all its tables
_FRACTIONS = ("time", "memory", "upload")
_TEXTS = ("model", "method", "variant", "backend")
_LEAST, _MOST = 1e-15, 1e18


class Content(NamedTuple):
    """What a file says."""

    facts: dict[str, Any]
    """Of the table, by the names that a :class:`~cocofl.profiling.ProfileTable` has for them."""
    costs: Mapping[Configuration, Cost]
    fractions: Mapping[Configuration, Sequence[float]]
    """Time, memory and upload, where only these are said, and no costs."""


def read(path: Path, name: str) -> Content:
    """A file in our format, or a published one."""
    return _parse(_read_json(path), name)


def write(path: Path, costs: Mapping[Configuration, Cost], facts: Mapping[str, Any]) -> None:
    """A file in our format, whole or not at all."""
    write_text(path, _to_text(costs, facts))


def _read_json(path: Path) -> Any:
    try:
        return parsed_json(read_limited(path))
    except FileNotFoundError as error:
        raise InvalidTable(
            f"there is no profile table at {path}; make one with `cocofl profile MODEL --out FILE`"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidTable(
            f"{path} cannot be read as a profile table: {error}. The file may be truncated; "
            "make it anew with `cocofl profile MODEL --out FILE`"
        ) from error


def _parse(content: Any, name: str) -> Content:
    """Tell the three formats apart."""
    if isinstance(content, list):
        return _published_list(content, name)
    if isinstance(content, dict) and content.get("format") == FORMAT:
        return _own(content, name)
    if isinstance(content, dict) and "unit" in content and "rows" in content:
        return _published_rows(content, name)
    raise InvalidTable(
        f"{name} is not a profile table: expected {FORMAT!r} as written by `cocofl profile`, "
        "or a list of objects with freeze, time, data and memory as the paper's authors publish"
    )


_SHAPES: dict[str, Check] = {
    **dict.fromkeys(("format", *_TEXTS, "source", "checksum"), check_of(str)),
    **dict.fromkeys(("n_blocks", "batch", "rank"), check_of(int)),
    "checkpoint": check_of(bool),
    "precision": check_of(Literal["float32", "bfloat16"]),
    "hardware": check_of(dict[str, str | int] | None),
    "process_bytes": check_of(int | None),
    "error": check_of(dict[str, float]),
    "columns": check_of(list[str]),
    "rows": check_of(list[list[str | float | None]]),
    "full": check_of(list[float | None]),
}
_UNUSUAL: dict[str, Any] = {"rank": 0, "checkpoint": False, "precision": FLOAT32, "full": None}
"""What a file says only where it is something else than this."""
_NOT_NEEDED = ("hardware", "process_bytes", "error", "checksum", *_UNUSUAL)
FACTS = (*_TEXTS, "source", "n_blocks", "batch", *_UNUSUAL, "hardware", "process_bytes", "error")
"""What a file says of a table beside its rows."""


def _own(content: Mapping[str, Any], name: str) -> Content:
    for key, choices in (("method", METHODS), ("source", SOURCES)):
        if content.get(key) not in choices:
            raise InvalidTable(
                f"{name}: {key} is {in_short(content.get(key))}; expected one of "
                f"{', '.join(choices)}"
            )
    kinds = [["width"]] if content["method"] == "width" else [["blocks"], ["start", "stop"]]
    rows = _rows(content, kinds, Cost._fields, name)
    incomplete = f"{name} is not a complete profile table"
    for key in content.keys() | _SHAPES.keys() - _NOT_NEEDED:
        if key not in content or key not in _SHAPES:
            raise InvalidTable(f"{incomplete}: {'unknown' if key in content else 'no'} {key[:40]}")
        if not _SHAPES[key](content[key]):
            raise InvalidTable(f"{incomplete}: {key} is {in_short(content[key])}")
    try:
        hardware = None if content.get("hardware") is None else Hardware(**content["hardware"])
    except TypeError as problem:
        raise InvalidTable(f"{incomplete}: {problem}") from problem
    for key, value in (asdict(hardware) if hardware else {}).items():
        if isinstance(value, int) != (key == "threads"):
            raise InvalidTable(f"{incomplete}: hardware.{key} is {in_short(value)}")
    unusual = {key: content.get(key, usual) for key, usual in _UNUSUAL.items()}
    is_compared = unusual["rank"] > 0 or unusual["checkpoint"] or unusual["precision"] != FLOAT32
    if is_compared != ("full" in content) or (is_compared and content["method"] == "width"):
        raise InvalidTable(
            f"{incomplete}: spans of a rank, with checkpoint or in bfloat16, and only they, have a "
            "row full"
        )
    unusual["full"] = _full(content, name) if is_compared else None
    facts = {
        **{key: content[key] for key in (*_TEXTS, "source", "n_blocks")},
        **unusual,
        "batch": _whole(content, "batch", name),
        "hardware": hardware,
        "process_bytes": content.get("process_bytes"),
        "error": content.get("error", {}),
        "name": name,
    }
    return Content(facts, {key: Cost(*values) for key, values in rows.items()}, {})


def _full(content: Mapping[str, Any], name: str) -> Cost:
    """What training every block whole costs, beside rows of something else."""
    values = content["full"]
    if len(values) != len(Cost._fields):
        raise InvalidTable(
            f"{name}: full is {in_short(values)}; expected {len(Cost._fields)} numbers"
        )
    everything: Configuration = Span(0, content["n_blocks"])
    return Cost(*_checked([(everything, values)], Cost._fields, name)[everything])


def _rows(
    content: Mapping[str, Any], kinds: Sequence[list[str]], fields: Sequence[str], name: str
) -> dict[Configuration, Sequence[Any]]:
    """What a file says of every configuration, which one of the kinds of columns names."""
    columns, rows = content.get("columns"), content.get("rows")
    # The last is the one that a wrong table is told of.
    keys = next((kind for kind in kinds if columns == [*kind, *fields]), None)
    if keys is None:
        raise InvalidTable(
            f"{name}: columns are {str(columns)[:200]}; expected {[*kinds[-1], *fields]}"
        )
    if not isinstance(rows, list) or not rows:
        raise InvalidTable(f"{name} has no rows")
    n_columns = len(keys) + len(fields)
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != n_columns:
            raise InvalidTable(f"{name}: row {i} is {in_short(row)}; expected {n_columns} numbers")
    # Of tables of before, of their rows only.
    if content.get("checksum") not in (None, _checksum(content), _checksum(rows)):
        raise InvalidTable(
            f"{name} was changed after it was written: it does not match its checksum. "
            'Profile again, or remove the "checksum" line if the change is meant'
        )
    n_blocks = _whole(content, "n_blocks", name, MOST_BLOCKS)
    read = _width if keys == ["width"] else partial(_blocks, n_blocks)
    pairs = ((read(row[: len(keys)], name), row[len(keys) :]) for row in rows)
    found = _checked(pairs, fields, name)
    if keys == ["width"]:
        if 1.0 not in found:
            raise InvalidTable(f"{name} lacks width 1, to which all fractions refer")
        return found
    _check_complete(found, n_blocks, name, adapters=bool(content.get("rank")))
    return found


def _check_complete(
    found: Mapping[Configuration, Sequence[Any]], n_blocks: int, name: str, *, adapters: bool
) -> None:
    """Refuse a table that lacks spans; of adapters, those of blocks that have some."""
    learning: Sequence[int] = range(n_blocks)
    if adapters:
        learning = sorted({block for own in found if isinstance(own, Blocks) for block in own})
    k = len(learning)
    every = (joined(learning[start:stop]) for start, stop in combinations(range(k + 1), 2))
    missing = (str(blocks) for blocks in every if blocks not in found)
    # Counted first: whoever says that there are a thousand blocks need not be asked for all spans.
    few = len(found) <= k * (k - 1) // 2
    if (first := [*islice(missing, 6)]) and (
        few or any(blocks not in found for blocks in spans_with_head(learning))
    ):
        shown = ", ".join(first[:5]) + (", …" if len(first) > 5 else "")
        raise InvalidTable(
            f"{name} has {len(found)} of the {k * (k + 1) // 2} spans of {k} "
            f"blocks; missing are {shown}"
        )


def _whole(content: Mapping[str, Any], key: str, name: str, most: int = 2**31) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidTable(
            f"{name}: {key} is {in_short(value)}; expected a whole number from 1 to {most}"
        )
    return value


def _width(key: Sequence[Any], name: str) -> float:
    (width,) = key
    if type(width) not in (int, float) or not 0 < width <= 1:
        raise InvalidTable(f"{name}: width {in_short(width)} is not a ratio in (0, 1]")
    return float(width)


def _blocks(n_blocks: int, key: Sequence[Any], name: str) -> Blocks:
    text = str(key[0]) if len(key) == 1 else ":".join(map(in_short, key))
    try:
        blocks = Blocks.parse(text)
        blocks.check_fits(n_blocks)
    except InvalidSpan:
        raise InvalidTable(
            f"{name}: {text[:60]} is not a span of a chain of {n_blocks} blocks"
        ) from None
    return blocks


def _checked(
    rows: Iterable[tuple[Configuration, Sequence[Any]]], fields: Sequence[str], name: str
) -> dict[Configuration, Sequence[Any]]:
    """Each configuration once, with numbers that can be costs."""
    found: dict[Configuration, Sequence[Any]] = {}
    for key, values in rows:
        if key in found:
            raise InvalidTable(f"{name} has two rows for {key}")
        for column, value in zip(fields, values, strict=True):
            if column != "rss_bytes" or value is not None:
                positive = not column.startswith("upload")
                _check_number(value, f"{name}: {column} of {key}", positive=positive)
        found[key] = values
    return found


def _check_number(value: Any, what: str, *, positive: bool = True) -> None:
    # So large or small that their fractions are still numbers.
    if type(value) not in (int, float) or not (
        _LEAST <= value <= _MOST or (value == 0 and not positive)
    ):
        expected = "a number above 0" if positive else "a number that is not negative"
        raise InvalidTable(f"{what} is {in_short(value)}; expected {expected}")


def _published_rows(content: Mapping[str, Any], name: str) -> Content:
    """The eight tables beside the paper: fractions of full training, and what full training is."""
    rows = _rows(content, [["start", "stop"]], _FRACTIONS, name)
    for key in ("full_step_seconds", "full_peak_gb"):
        _check_number(content.get(key), f"{name}: {key}")
    return _of_fractions(
        rows,
        content["n_blocks"],
        model=f"{content.get('network')} on {content.get('platform')}",
        name=name,
        full_step_s=float(content["full_step_seconds"]),
        full_memory_bytes=content["full_peak_gb"] * 1e9,
    )


def _published_list(content: Sequence[Any], name: str) -> Content:
    """The authors' own form: a list of {freeze: frozen blocks, time, data, memory}."""
    if not content:
        raise InvalidTable(f"{name} has no rows")
    entries = []
    for i, entry in enumerate(content):
        try:
            frozen = [int(block) for block in entry["freeze"]]
            if any(block >= MOST_BLOCKS for block in frozen):
                raise ValueError(f"no chain has more than {MOST_BLOCKS} blocks")
            entries.append((frozen, [entry["time"], entry["memory"], entry["data"]]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InvalidTable(
                f"{name}: entry {i} is not an object with freeze, time, data and memory: {error!r}"
            ) from error
    n_blocks = 1 + max((block for frozen, _ in entries for block in frozen), default=0)
    pairs = ((_span_beside(frozen, n_blocks, name), values) for frozen, values in entries)
    rows = _checked(pairs, _FRACTIONS, name)
    return _of_fractions(rows, n_blocks, model=Path(name).stem, name=name)


def _span_beside(frozen: list[int], n_blocks: int, name: str) -> Span:
    """The span that is trained where these blocks are frozen."""
    trained = sorted(set(range(n_blocks)) - set(frozen))
    if not trained or len(trained) != trained[-1] - trained[0] + 1 or min(frozen, default=0) < 0:
        raise InvalidTable(
            f"{name}: with blocks {str(frozen)[:60]} frozen of {n_blocks}, the trained ones are "
            f"{str(trained)[:60]}; expected one contiguous range"
        )
    return Span(trained[0], trained[-1] + 1)


def _of_fractions(
    rows: Mapping[Configuration, Sequence[float]], n_blocks: int, **facts: Any
) -> Content:
    same = {"method": "span", "variant": "qff", "source": "published", "batch": PUBLISHED_BATCH}
    return Content({**same, "n_blocks": n_blocks, **facts}, {}, rows)


def _to_text(costs: Mapping[Configuration, Cost], facts: Mapping[str, Any]) -> str:
    columns = ["width"]
    keys: list[list[Any]] = [[key] for key in costs]
    if facts["method"] == "span":
        columns, keys = ["blocks"], [[str(key)] for key in costs]
        spans = [key for key in costs if isinstance(key, Span)]
        if len(spans) == len(keys):
            columns, keys = ["start", "stop"], [[span.start, span.stop] for span in spans]
    rows = [[*key, *cost] for key, cost in zip(keys, costs.values(), strict=True)]
    hardware, held = facts["hardware"], facts["process_bytes"]
    head = {
        "format": FORMAT,
        **{key: facts[key] for key in (*_TEXTS, "source", "n_blocks", "batch")},
        **{key: facts[key] for key, usual in _UNUSUAL.items() if facts[key] != usual},
        "hardware": None if hardware is None else asdict(hardware),
        **({} if held is None else {"process_bytes": held}),
        "error": dict(facts["error"]),
        "columns": [*columns, *Cost._fields],
    }
    checksum = _checksum({**head, "rows": rows})
    lines = [f" {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    end = f' ],\n "checksum": "{checksum}"\n}}\n'
    return "\n".join(["{", *lines, ' "rows": [', body, end])


def _checksum(content: Mapping[str, Any] | Sequence[Any]) -> str:
    """Of rows, or of all that a table says."""
    if isinstance(content, Mapping):
        content = {key: value for key, value in content.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
