"""Mutate every kind of file that is read, and see what its reader makes of it.

python bench/hostile_files.py --count 100000 --seed 1

Flipped bits, cuts, splices, noise, and changes of what the content says (deep nesting, huge
numbers, wrong types, keys that stand twice). Every mutant must be read or refused with a
CocoflError, within 5 s and 500 MB; what is read is judged by a second opinion that shares no code
with the reader. Exit code 1 if any is not.
"""

from __future__ import annotations

import argparse
import copy
import csv
import hashlib
import io
import json
import math
import multiprocessing
import resource
import signal
import sys
import tempfile
import time
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fuzz_updates
from cocofl.config import Experiment
from cocofl.data.samples import Facts, NewSamples, open_samples, write_samples
from cocofl.errors import CocoflError
from cocofl.fl.devices import groups_from, read_trace
from cocofl.flower.settings import node_budget
from cocofl.flower.updates import Contract
from cocofl.freeze import KernelPlan
from cocofl.profiling.configurations import Configuration, Cost
from cocofl.profiling.hardware import Hardware
from cocofl.profiling.table import ProfileTable
from cocofl.reproduction import results
from cocofl.runlog import (
    ABOUT,
    CHECKPOINT,
    EXPERIMENT,
    METRICS,
    TIMING,
    DeviceRecord,
    RoundRecord,
    RunFolder,
)
from cocofl.span import all_spans

MOST_S, MOST_BYTES = 5.0, 500 * 10**6
Rng = np.random.Generator


class Hang(BaseException):
    """A reader took longer than it may."""


@dataclass(frozen=True)
class Kind:
    """A kind of file: some that are sound, who reads it, and who else can judge it."""

    name: str
    originals: Sequence[bytes]
    read: Callable[[Path], Any]
    wrong: Callable[[bytes, bytes, Any], str]
    """From original, mutant and what was read of it to what is wrong with that, if anything."""
    suffix: str = ""
    restructure: Callable[[Rng, bytes], bytes] | None = None
    """Changes what the content says, and keeps its form."""
    file: str = "file"
    share: float = 1.0
    extra: dict[str, bytes] = field(default_factory=dict)


# --- mutations of bytes --------------------------------------------------------------------------


def flip_bits(rng: Rng, one: bytes, _other: bytes) -> bytes:
    changed = bytearray(one)
    for at in rng.integers(len(changed), size=rng.integers(1, 4)):
        changed[at] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def cut(rng: Rng, one: bytes, _other: bytes) -> bytes:
    return one[: rng.integers(len(one))]


def grow(rng: Rng, one: bytes, _other: bytes) -> bytes:
    at = int(rng.integers(len(one) + 1))
    return one[:at] + rng.bytes(int(rng.integers(1, 64))) + one[at:]


def drop_piece(rng: Rng, one: bytes, _other: bytes) -> bytes:
    at = int(rng.integers(len(one)))
    return one[:at] + one[at + int(rng.integers(1, 64)) :]


def splice(rng: Rng, one: bytes, other: bytes) -> bytes:
    return one[: rng.integers(len(one))] + other[rng.integers(len(other)) :]


def repeat(rng: Rng, one: bytes, _other: bytes) -> bytes:
    begin, end = sorted(rng.integers(len(one), size=2))
    return one[:end] + one[begin:end] * int(rng.integers(1, 20)) + one[end:]


def noise(rng: Rng, one: bytes, _other: bytes) -> bytes:
    return rng.bytes(int(rng.integers(0, 2 * len(one))))


def wrong_length(rng: Rng, one: bytes, _other: bytes) -> bytes:
    """Of the header that a safetensors file begins with."""
    lengths = [0, 1, 7, 2**31, 2**63, 2**64 - 1, len(one)]
    return lengths[int(rng.integers(len(lengths)))].to_bytes(8, "little") + one[8:]


BYTES = [flip_bits, flip_bits, cut, grow, drop_piece, splice, repeat, noise, wrong_length]


# --- mutations of what is said -------------------------------------------------------------------

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3000, 10**9, 2**63, 10**30, 10**400, -(10**400), 1e308, 5e-324,
    math.nan, math.inf, -math.inf, "", "a", "\x00", "x" * 5000, "0:999999999", "os:system", "../..",
    [], {}, [[]], {"a": {}}, ["a"] * 300, [0] * 3000,
]  # fmt: skip
DEEP = "[" * 3000 + "]" * 3000


def odd(rng: Rng) -> Any:
    return copy.deepcopy(ODD[int(rng.integers(len(ODD)))])


def _places(content: Any) -> list[tuple[Any, Any]]:
    """Every value of nested tables and lists, as what holds it and where."""
    found: list[tuple[Any, Any]] = []
    waiting = [content]
    while waiting:
        held = waiting.pop()
        if isinstance(held, dict | list):
            keys = list(held) if isinstance(held, dict) else range(len(held))
            found += [(held, key) for key in keys]
            waiting += [held[key] for key in keys]
    return found


def change(rng: Rng, content: Any) -> Any:
    """One or two values replaced, renamed, left out, copied elsewhere, or wrapped."""
    for _ in range(int(rng.integers(1, 3))):
        places = _places(content)
        if not places:
            return odd(rng)
        holder, key = places[int(rng.integers(len(places)))]
        other, other_key = places[int(rng.integers(len(places)))]
        how = int(rng.integers(7))
        if how <= 1:
            holder[key] = odd(rng)
        elif how == 2:
            del holder[key]
        elif how == 3:
            holder[key] = copy.deepcopy(other[other_key])
        elif how == 4:
            holder[key] = copy.deepcopy([holder[key]]) * int(rng.integers(1, 40))
        elif how == 5 and isinstance(holder, dict):
            holder[str(odd(rng))[:40]] = holder.pop(key)
        elif isinstance(holder[key], int | float) and abs(holder[key]) < 1e15:
            holder[key] = holder[key] * -1 + int(rng.integers(-2, 3))
    return content


def change_json(rng: Rng, text: bytes) -> bytes:
    """The same JSON with another content, or with something that only a text can have."""
    kind = int(rng.integers(10))
    if kind == 0:
        return text.replace(b"[", DEEP.encode()[: int(rng.integers(1, 6000))], 1)
    if kind == 1 and b'"' in text:  # a key that stands twice
        begin = text.index(b"{") + 1
        end = text.index(b":", begin)
        return text[:begin] + text[begin:end] + b": 3, " + text[begin:]
    return json.dumps(change(rng, json.loads(text))).encode()


def change_lines(rng: Rng, text: bytes) -> bytes:
    """JSON lines: one of them changed, moved, or there once more."""
    lines = text.splitlines(keepends=True)
    at, other = (int(i) for i in rng.integers(len(lines), size=2))
    if rng.integers(4) == 0:
        lines[at] = lines[other]
    else:
        lines[at] = change_json(rng, lines[at]) + b"\n"
    return b"".join(lines)


def change_header(rng: Rng, content: bytes) -> bytes:
    """A safetensors file with another header."""
    end = 8 + int.from_bytes(content[:8], "little")
    text = change_json(rng, content[8:end])
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + content[end:]


TOML_ODD = [
    "[" * 500, "{a=" * 500, DEEP, "0x" + "f" * 4000, "9" * 6000, "1e999", "-1", "nan",
    "'os:system'", '"""', "1979-05-27", "[1, 'a', {b = 2}]", "true", "''", "{}", "[]", "3000",
    "1" + "0" * 18, '"a\\u0000b"', "." .join("a" * 3000) + " = 1", "'" + "x" * 5000 + "'",
]  # fmt: skip


def change_toml(rng: Rng, text: bytes) -> bytes:
    """A value, a key or a header of TOML is something else."""
    lines = text.decode().splitlines()
    at, odd_one = int(rng.integers(len(lines))), TOML_ODD[int(rng.integers(len(TOML_ODD)))]
    key, equals, value = lines[at].partition("=")
    how = int(rng.integers(7))
    if how <= 2 and equals:
        lines[at] = f"{key}= {odd_one}"
    elif how == 3:
        base = ["/dev/zero", "a\\u0000b", "x" * 300, "file", "..", "/proc/self/mem", ""]
        lines.insert(0, f'base = "{base[int(rng.integers(len(base)))]}"')
    elif how == 4:
        depth = int(rng.integers(2, 3000))
        lines.insert(at, f"[{'.'.join(['a'] * depth)}]")
    elif how == 5:
        lines.insert(at, lines[int(rng.integers(len(lines)))])
    else:
        lines[at] = f"{odd_one} = {value}"
    return "\n".join(lines).encode()


CELLS = ["", "-1", "nan", "inf", "1e400", "9" * 5000, "x", '"', "0.5,0.5", "\x00", "1_0", "0x1"]


def change_csv(rng: Rng, text: bytes) -> bytes:
    """A cell is something else, or a column or row is gone or there twice."""
    rows = list(csv.reader(io.StringIO(text.decode())))
    row, other = (int(i) for i in rng.integers(len(rows), size=2))
    column = int(rng.integers(len(rows[row])))
    how = int(rng.integers(5))
    if how <= 1:
        rows[row][column] = CELLS[int(rng.integers(len(CELLS)))]
    elif how == 2:
        rows[row].pop(column)
    elif how == 3:
        rows[row] = rows[other]
    else:
        for one in rows:
            one.insert(column, one[min(column, len(one) - 1)])
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()


# --- kinds ---------------------------------------------------------------------------------------


def sound_tables() -> list[bytes]:
    costs: dict[Configuration, Cost] = {
        s: Cost(0.01 * len(s), None, 1000 * len(s), 10 * len(s)) for s in all_spans(5)
    }
    widths: dict[Configuration, Cost] = {w: Cost(w, 10**6, 10**6, 4) for w in (0.25, 0.5, 1.0)}
    facts = {"model": "toy", "backend": "auto", "batch": 32, "source": "measured"}
    facts |= {"hardware": Hardware("a CPU", 2, "2.13.0", "1a2b3c4d"), "error": {"time_max": 0.1}}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for method, variant, known in (("span", "qff", costs), ("width", "", widths)):
            table = ProfileTable.from_costs(
                known, n_blocks=5, method=method, variant=variant, **facts
            )
            path = Path(folder) / method
            table.save(path)
            found.append(path.read_bytes())
    spans = [{"freeze": [i for i in range(4) if i not in s], "time": 0.5, "data": 1, "memory": 1}
             for s in ((0,), (1, 2), (0, 1, 2, 3))]  # fmt: skip
    own = json.loads(found[0])
    by_hand = {key: value for key, value in own.items() if key != "checksum"}
    return [*found, json.dumps(spans).encode(), json.dumps(by_hand).encode()]


def wrong_table(_original: bytes, mutant: bytes, table: ProfileTable) -> str:
    content = json.loads(mutant)
    if isinstance(content, dict) and "checksum" in content:
        rest = {key: value for key, value in content.items() if key != "checksum"}
        sums = [
            hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest()[:16]
            for one in (rest, content["rows"])
        ]
        if content["checksum"] not in sums:
            return "the checksum is another"
    numbers = np.concatenate([table.time, table.memory, table.upload])
    if not np.isfinite(numbers).all() or (numbers < 0).any() or table.n_blocks > 1024:
        return "costs that are none"
    return ""


def wrong_experiment(_original: bytes, _mutant: bytes, found: Experiment) -> str:
    devices, training = found.devices, found.training
    good = found.rounds >= 1 and found.seed >= 0 and 1 <= devices.per_round <= devices.count <= 1e7
    good = good and training.lr >= 0 and training.batch >= 1 and found.evaluation.every >= 1
    return "" if good and Experiment.parse(found.to_dict()) == found else "settings out of range"


def sound_metrics() -> list[bytes]:
    found = []
    for tested in (True, False):
        lines = []
        for number in range(1, 7):
            devices = [DeviceRecord(3, "weak", "0:2", "merged"), DeviceRecord(5, "", None, "late")]
            scores = {"accuracy": 0.5, "f1": 0.25, "class_accuracy": [0.5, 1.0]}
            scores["group_accuracy"] = {"weak": 0.5}
            reasons = None if tested else [(5, "values: not finite")]
            one = RoundRecord(number, 0.1, 0.25, 1000, 1.5, devices, reasons=reasons)
            lines.append(json.dumps(replace(one, scores=scores if tested else {}).to_json()))
        found.append(("\n".join(lines) + "\n").encode())
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def wrong_metrics(_original: bytes, _mutant: bytes, found: list[RoundRecord]) -> str:
    for number, one in enumerate(found, start=1):
        if one.round != number:
            return "rounds that are not counted"
        plain = (one.lr, one.simulated_s, one.bytes_up)
        if not all(_is_number(value) and math.isfinite(value) for value in plain):
            return "figures that are no numbers"
        if one.simulated_s < 0 or one.bytes_up < 0 or isinstance(one.bytes_up, float):
            return "figures that cannot be"
        for device in one.devices:
            good = isinstance(device.device, int) and isinstance(device.group, str)
            if not good or not isinstance(device.work, str | None) or device.device < 0:
                return "devices that are none"
        for value in one.scores.values():
            inner = value.values() if isinstance(value, dict) else value
            inner = inner if isinstance(value, dict | list) else [value]
            if not all(map(_is_number, inner)):
                return "scores that are no numbers"
    return ""


def sound_about() -> list[bytes]:
    place = {"cocofl": "0.1.0", "commit": "abc", "torch": "2.13.0", "python": "3.11.7"}
    place |= {"hardware": "a CPU", "engine": "serial"}
    about = {
        "command": "cocofl run", **place, "strategy": "cocofl", "tables": {"qff": "t: made up"},
        "strategy_facts": {"label": "CoCoFL", "is_bound": False, "order": 1}, "model_blocks": 10,
        "metrics": {"accuracy": {"name": "accuracy", "higher_is_better": True, "is_share": True}},
        "samples_left_over": 3,
    }  # fmt: skip
    return [
        json.dumps(one).encode()
        for one in (about, {**about, "before": [{"rounds": 3, **place, "tables": {}}]})
    ]


def wrong_about(_original: bytes, _mutant: bytes, told: tuple[dict[str, Any], str]) -> str:
    about, text = told
    texts = ("command", "cocofl", "commit", "torch", "python", "hardware", "engine", "strategy")
    if not all(isinstance(about.get(key, ""), str) for key in texts) or not isinstance(text, str):
        return "texts that are none"
    if not all(isinstance(one, str) for one in about.get("tables", {}).values()):
        return "tables that are none"
    blocks = about.get("model_blocks", 0)
    return "" if isinstance(blocks, int) and 0 <= blocks <= 1024 else "blocks that cannot be"


def sound_plans() -> list[bytes]:
    choices = {f"conv {i} | 1 threads": ("reference", "onednn")[i % 2] for i in range(6)}
    return [json.dumps({"format": "cocofl kernel plan 1", "choices": choices}, indent=1).encode()]


def wrong_plan(_original: bytes, _mutant: bytes, plan: KernelPlan) -> str:
    known = {"reference", "onednn", "legacy"}
    return "" if set(plan.choices.values()) <= known else "kernels that are none"


def sound_states() -> list[bytes]:
    torch.manual_seed(0)
    state = {"a.weight": torch.randn(8, 4), "a.bias": torch.randn(8), "n": torch.tensor(3)}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        for rounds in (3, 12):
            run.save_checkpoint(rounds, {key: t + rounds for key, t in state.items()})
            found.append((run.path / CHECKPOINT).read_bytes())
    return found


def wrong_state(original: bytes, mutant: bytes, _found: Any) -> str:
    if mutant == original:
        return ""
    end = 8 + int.from_bytes(mutant[:8], "little")
    about = json.loads(mutant[8:end]).get("__metadata__") or {}
    if "sha256" not in about:  # as a file of before there were any, or of somebody else
        return "" if set(about) <= {"rounds"} or "rounds" not in about else "facts of nobody"
    stated = about["sha256"].encode()
    blank = mutant[:end].replace(stated, b"0" * 64, 1) + mutant[end:]
    return "" if hashlib.sha256(blank).hexdigest().encode() == stated else "the checksum is another"


def sound_splits() -> list[bytes]:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 4, 4, 1), dtype=np.uint8)
    tokens = rng.integers(0, 50, (12, 6)).astype(np.uint16)
    labels = np.arange(12) % 3
    facts = Facts("image", ("a", "b", "c"), channels=3)
    words = Facts("text", ("a", "b", "c"), vocab_size=50, pad_id=0, owner_names=("me", "you"))
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "split"
        write_samples(path, NewSamples(facts, labels, (4, 4, 1), [images]))
        found.append(path.read_bytes())
        owners = np.arange(12) % 2
        write_samples(path, NewSamples(words, labels, (6,), [tokens], "uint16", owners))
        found.append(path.read_bytes())
    return found


def read_split(path: Path) -> Any:
    open_samples(path)  # whatever it is, it is no other exception
    return open_samples(path, verify=True)


def wrong_split(original: bytes, mutant: bytes, _found: Any) -> str:
    return "" if mutant == original else "the checksum is another"


def sound_results() -> list[bytes]:
    files = sorted((Path(__file__).parents[1] / "results").glob("*.csv"))
    return [b"".join(path.read_bytes().splitlines(keepends=True)[:6]) for path in files]


def wrong_results(_original: bytes, _mutant: bytes, found: list[results.Result]) -> str:
    for one in found:
        if one.seed < 0 or one.rounds < 0 or not 0 <= one.minutes < math.inf:
            return "numbers that cannot be"
        if not all(isinstance(value, float) for value in one.scores.values()):
            return "scores that are no numbers"
    return ""


TRACE = b"device,round,time,memory,upload,available\n0,0,1,,,\n1,0,0.5,200MB,,0\n1,2,30s,,1,1\n"


def wrong_trace(_original: bytes, _mutant: bytes, found: Any) -> str:
    good = all(
        device >= 0 and rows[0][0] == 0 and rows == sorted(rows, key=lambda row: row[0])
        for device, rows in found.items()
    )
    return "" if found and good else "rows that cannot be"


def wrong_budget(_original: bytes, mutant: bytes, budget: Any) -> str:
    said = set(tomllib.loads(mutant.decode()))
    values = (budget.time, budget.memory, budget.upload, budget.time_s, budget.memory_bytes)
    return "" if said <= {"time", "memory", "upload"} and all(v >= 0 for v in values) else "limits"


def kinds() -> list[Kind]:
    """Every kind of file that is read."""
    toml = Experiment().to_toml().encode()
    groups = b'[[devices.groups]]\nname = "a"\ntime = 0.5\n[[devices.groups]]\nname = "b"\n'
    small = b'base = "base.toml"\nrounds = 3\n[training]\nlr = 0.05\n' + groups

    def read_experiment(path: Path) -> Experiment:
        found = Experiment.load(path)
        if isinstance(found.devices.groups, list):
            tables = [one for one in found.devices.groups if isinstance(one, dict)]
            groups_from([{k: v for k, v in one.items() if k != "trace"} for one in tables])
        return found

    def read_about(path: Path) -> Any:
        run = RunFolder(path.parent)
        return run.about, run.origin("hardware")

    def read_metrics(path: Path) -> Any:
        return RunFolder(path.parent).rounds()

    def read_state(path: Path) -> Any:
        return RunFolder(path.parent).model()

    def read_budget(path: Path) -> Any:
        return node_budget({"budget-file": str(path), "profile": "mine"}, 100)

    timing = b'{"train_s": 0.5, "evaluate_s": 0.0}\n' * 4
    return [
        Kind("table", sound_tables(), ProfileTable.load, wrong_table, restructure=change_json),
        Kind("experiment", [toml, small], read_experiment, wrong_experiment,
             restructure=change_toml, file=EXPERIMENT, extra={"base.toml": toml}),
        Kind("metrics", sound_metrics(), read_metrics, wrong_metrics,
             restructure=change_lines, file=METRICS),
        Kind("timing", [timing], lambda path: RunFolder(path.parent).timing(),
             lambda *_: "", restructure=change_lines, file=TIMING, share=0.3),
        Kind("about", sound_about(), read_about, wrong_about, restructure=change_json, file=ABOUT),
        Kind("plan", sound_plans(), KernelPlan.load, wrong_plan, restructure=change_json),
        Kind("state", sound_states(), read_state, wrong_state,
             restructure=change_header, file=CHECKPOINT),
        Kind("split", sound_splits(), read_split, wrong_split, restructure=change_header),
        Kind("results", sound_results(), results.read, wrong_results, restructure=change_csv),
        Kind("trace", [TRACE], read_trace, wrong_trace, restructure=change_csv, share=0.5),
        Kind("budget", [b'time = "30s"\nmemory = 0.5\n'], read_budget, wrong_budget,
             restructure=change_toml, share=0.3),
    ]  # fmt: skip


# --- playing -------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of mutants."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def note(self, kind: str, number: int, defect: str, said: str) -> None:
        self.defects[defect] += 1
        self.examples.append(f"{kind} {number}: {defect}: {said}"[:300])


def _bytes_in_use() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _too_long(*_: object) -> None:
    raise Hang


def judge(
    kind: str, number: int, tally: Tally, read: Callable[[], Any], wrong: Callable[[Any], str]
) -> None:
    """Read one mutant under limits, and note what became of it."""
    begin = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        found = read()
    except CocoflError:
        tally.outcomes[f"{kind}: refused"] += 1
    except Hang:
        tally.note(kind, number, "hang", f"more than {MOST_S} s")
    except MemoryError:
        tally.note(kind, number, "memory", f"more than {MOST_BYTES} bytes")
    except Exception as error:
        tally.note(kind, number, "foreign", repr(error))
    else:
        tally.outcomes[f"{kind}: read"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            problem = wrong(found)
        except Exception as error:  # what nobody can judge should not have been read
            problem = f"cannot be judged: {error!r}"
        if problem:
            tally.note(kind, number, "accepted", problem)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.perf_counter() - begin > MOST_S and not tally.defects["hang"]:
        tally.note(kind, number, "hang", "in one call")


def play_files(one: Kind, count: int, rng: Rng, folder: Path, tally: Tally) -> None:
    """Mutate files of a kind."""
    place = folder / one.name
    place.mkdir()
    for name, content in one.extra.items():
        (place / name).write_bytes(content)
    path = place / one.file
    for original in one.originals:
        path.write_bytes(original)
        found = one.read(path)
        assert not one.wrong(original, original, found), one.name
    for number in range(count):
        first, other = (one.originals[int(i)] for i in rng.integers(len(one.originals), size=2))
        if one.restructure is not None and number % 2:
            mutant = one.restructure(rng, first)
        else:
            mutant = BYTES[int(rng.integers(len(BYTES)))](rng, first, other)
        if mutant in one.originals:
            tally.outcomes[f"{one.name}: unchanged"] += 1
            continue
        path.write_bytes(mutant)
        judge(
            one.name,
            number,
            tally,
            lambda: one.read(path),
            lambda found, a=first, b=mutant: one.wrong(a, b, found),  # type: ignore[misc]
        )


def play_updates(count: int, rng: Rng, tally: Tally) -> None:
    """Mutate what devices send; the second opinion is that of ``fuzz_updates``."""
    chain, state, originals = fuzz_updates.real_updates()
    limits = fuzz_updates.MAX_SAMPLES, fuzz_updates.MAX_CHANGE
    contract = Contract(chain, max_samples=limits[0], max_change=limits[1])
    for number in range(count):
        one, other = (originals[int(i)] for i in rng.integers(len(originals), size=2))
        mutation = fuzz_updates.MUTATIONS[number % len(fuzz_updates.MUTATIONS)]
        payload, may_pass = mutation(rng, one, other)
        if payload in (one.payload, other.payload):
            tally.outcomes["update: unchanged"] += 1
            continue

        def wrong(_found: Any, sent: bytes = payload, may: bool = may_pass) -> str:
            return fuzz_updates.second_opinion(chain, state, sent) if may else "must not pass"

        judge("update", number, tally, lambda: contract.decode(payload, state), wrong)  # noqa: B023


UPDATES = "update"


def play(job: tuple[str, int, int]) -> Tally:
    """All mutants of one kind, in a process of its own that gets so much memory and no more."""
    name, count, seed = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    rng, tally = np.random.default_rng([seed, *name.encode()]), Tally()
    most = _bytes_in_use() + MOST_BYTES
    if name == UPDATES:
        play_updates(count, rng, tally)
        return tally
    (one,) = (kind for kind in kinds() if kind.name == name)
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        play_files(one, count, rng, Path(folder), tally)
    return tally


def shares(count: int) -> dict[str, int]:
    """How many mutants of each kind."""
    weights = {kind.name: kind.share for kind in kinds()} | {UPDATES: 1.0}
    return {name: max(1, round(count * w / sum(weights.values()))) for name, w in weights.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", help="default: all")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    counts = shares(arguments.count)
    jobs = [
        (name, n, arguments.seed)
        for name, n in counts.items()
        if not arguments.kinds or name in arguments.kinds
    ]
    torch.set_num_threads(1)
    # The longest first; each in a process of its own: a limit on memory cannot be taken back.
    jobs.sort(key=lambda job: (job[0] != UPDATES, -job[1]))
    context = multiprocessing.get_context("fork")
    total = Tally()
    with context.Pool(arguments.processes, maxtasksperchild=1) as pool:
        for tally in pool.imap_unordered(play, jobs, chunksize=1):
            total.outcomes.update(tally.outcomes)
            total.defects.update(tally.defects)
            total.examples += tally.examples
    print(
        json.dumps(
            {
                "mutants": sum(n for _, n, _ in jobs),
                "seconds": round(time.perf_counter() - begin, 1),
                "outcomes": dict(sorted(total.outcomes.items())),
                "foreign exceptions": total.defects["foreign"],
                "hangs": total.defects["hang"],
                "over 500 MB": total.defects["memory"],
                "wrong but accepted": total.defects["accepted"],
                "examples": total.examples[:20],
            },
            indent=1,
        )
    )
    return 1 if total.defects else 0


if __name__ == "__main__":
    sys.exit(main())
