"""Mutate real updates and see what the server makes of them.

python bench/fuzz_updates.py --count 100000 --seed 1

Every mutant must be decoded or rejected, nothing else; what is accepted is judged by a second
opinion that shares no code with the decoder. Exit code 1 if the two ever differ.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from cocofl.chain import BlockChain
from cocofl.config import Experiment
from cocofl.errors import RejectedUpdate
from cocofl.experiment import Setup
from cocofl.fl.merge import Mean
from cocofl.fl.spans import SpanWork
from cocofl.fl.state import ServerState, Tensors
from cocofl.fl.trainer import Task
from cocofl.flower.updates import Contract, Request
from cocofl.freeze.state import block_state
from cocofl.span import Span

Rng = np.random.Generator
MAX_SAMPLES, MAX_CHANGE = 5000, 3.0
REQUEST = Request(6, 8 * "5eed", 8 * "f00d")


@dataclass(frozen=True)
class Original:
    """A real update, and where its values begin."""

    payload: bytes

    @property
    def values_at(self) -> int:
        return 8 + int.from_bytes(self.payload[:8], "little")

    @property
    def header(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.payload[8 : self.values_at])
        return content

    @property
    def about(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.header["__metadata__"]["cocofl"])
        return content

    def with_header(self, header: Any) -> bytes:
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + self.payload[self.values_at :]

    def with_about(self, about: Any) -> bytes:
        text = json.dumps(about, separators=(",", ":"))
        return self.with_header({**self.header, "__metadata__": {"cocofl": text}})


def real_updates() -> tuple[BlockChain, Tensors, list[Original]]:
    """What devices really send: every span of the tiny network, trained on digits."""
    experiment = Experiment.parse(
        {
            "model": {"name": "resnet10-digits", "options": {"tiny": True}},
            "training": {"batch": 16},
            "engine": {"kernels": "reference"},
        }
    )
    job = Setup(experiment).job()
    trainer = job.trainer
    assert job.federation is not None
    chain = trainer.chain()
    contract = Contract(chain, max_samples=MAX_SAMPLES, max_change=MAX_CHANGE)
    found = []
    for start in range(len(chain)):
        for stop in range(start + 1, len(chain) + 1):
            work = SpanWork(Span(start, stop), "qff" if (start + stop) % 3 else "f")
            task = Task(0, 0, start, job.federation.partition[start][:16], work, 0.05)
            found.append(Original(contract.encode(trainer.train(task, job.initial), REQUEST)))
    return chain, job.initial.tensors, found


# --- mutations: each gives bytes, and whether they can possibly be an update still ---------------

Mutant = tuple[bytes, bool]


def flip_bits(rng: Rng, one: Original, _other: Original) -> Mutant:
    changed = bytearray(one.payload)
    for at in rng.integers(len(changed), size=rng.integers(1, 4)):
        changed[at] ^= 1 << int(rng.integers(8))
    return bytes(changed), True


def cut(rng: Rng, one: Original, _other: Original) -> Mutant:
    return one.payload[: rng.integers(len(one.payload))], False


def grow(rng: Rng, one: Original, _other: Original) -> Mutant:
    extra = rng.bytes(int(rng.integers(1, 64)))
    at = int(rng.integers(len(one.payload) + 1))
    return one.payload[:at] + extra + one.payload[at:], False


def drop_piece(rng: Rng, one: Original, _other: Original) -> Mutant:
    at = int(rng.integers(len(one.payload)))
    return one.payload[:at] + one.payload[at + int(rng.integers(1, 64)) :], False


def noise(rng: Rng, one: Original, _other: Original) -> Mutant:
    return rng.bytes(int(rng.integers(0, 2 * len(one.payload)))), False


def too_big(_rng: Rng, one: Original, _other: Original) -> Mutant:
    return one.payload + bytes(10**6), False


def cross(_rng: Rng, one: Original, other: Original) -> Mutant:
    """The header of one with the values of another; equal spans may fit."""
    return one.payload[: one.values_at] + other.payload[other.values_at :], True


def wrong_length(rng: Rng, one: Original, _other: Original) -> Mutant:
    lengths = [0, 1, 7, 2**31, 2**63, 2**64 - 1, one.values_at]
    length = lengths[int(rng.integers(len(lengths)))]
    return length.to_bytes(8, "little") + one.payload[8:], False


def wrong_fact(rng: Rng, one: Original, _other: Original) -> Mutant:
    """One field of the metadata says something else."""
    field = str(rng.choice(list(one.about)))
    wrong: dict[str, list[Any]] = {
        "format": ["", "cocofl update 1", None, 1],
        "round": [6, 8, 0, -1, 7.0, "7", None, True, [], 10**30, {}],
        "nonce": ["", "5eed" * 7, None, 5, [], "x" * 3000],
        "state": ["", "f00d" * 7, None, 5, {}, "\u0000"],
        "layout": ["0" * 16, "", None, 5, "g" * 16],
        "span": [[0], [0, 99], [-1, 1], [2, 1], [1, 1], "0:1", [0.0, 1.0], [True, 2], None, {}],
        "samples": [0, -1, 5001, 10**30, 1.5, "9", None, True, [], math.nan],
        "loss": [math.nan, math.inf, -math.inf, "0", None, 3, [], 10**400],
        "scales": ["", "-1", "zz", "f" * 4000, None, 7, "0x1", " 1", "1_0"],
    }
    value = wrong[field][int(rng.integers(len(wrong[field])))]
    return one.with_about({**one.about, field: value}), False


def wrong_about(rng: Rng, one: Original, _other: Original) -> Mutant:
    about = one.about
    key = str(rng.choice(list(about)))
    deep = '{"a":' * 1000 + "1" + "}" * 1000
    choices: list[Any] = [
        {k: v for k, v in about.items() if k != key},
        {**about, "device": 7},
        dict(reversed(about.items())),
        [],
        None,
    ]
    index = int(rng.integers(len(choices) + 1))
    if index == len(choices):
        return one.with_header({**one.header, "__metadata__": {"cocofl": deep}}), False
    return one.with_about(choices[index]), False


def wrong_header(rng: Rng, one: Original, _other: Original) -> Mutant:
    """Tensors renamed, added, left out, of other types, shapes, places."""
    header = one.header
    name = next(key for key in header if key != "__metadata__")
    entry = header[name]
    begin, end = entry["data_offsets"]
    rest = {key: value for key, value in header.items() if key != name}
    choices: list[Any] = [
        {**rest, "conv.weight": entry},
        {**header, "extra": {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}},
        rest,
        {**header, name: {**entry, "dtype": "I32"}},
        {**header, name: {**entry, "dtype": "F16"}},
        {**header, name: {**entry, "shape": [1, *entry["shape"]]}},
        {**header, name: {**entry, "shape": [2**40]}},
        {**header, name: {**entry, "data_offsets": [begin, end + 4]}},
        {**header, name: {**entry, "data_offsets": [-4, end]}},
        {**header, name: {**entry, "more": 1}},
        {**header, "__metadata__": {**header["__metadata__"], "more": "1"}},
        {**header, "__metadata__": "cocofl"},
        [header],
    ]
    return one.with_header(choices[int(rng.integers(len(choices)))]), False


def wrong_value(rng: Rng, one: Original, _other: Original) -> Mutant:
    """Numbers that no training gives, somewhere among the values."""
    changed = bytearray(one.payload)
    bad = float(rng.choice([math.nan, math.inf, -math.inf, 1e30, -1e30]))
    at = one.values_at + 4 * int(rng.integers((len(changed) - one.values_at) // 4))
    changed[at : at + 4] = np.float32(bad).tobytes()
    # A scale may be large; everything else is then too far away.
    scales = bin(int(one.about["scales"], 16)).count("1")
    is_scale = at >= len(changed) - 4 * scales
    return bytes(changed), is_scale and bad == 1e30


def wrong_scale(rng: Rng, one: Original, other: Original) -> Mutant:
    scales = bin(int(one.about["scales"], 16)).count("1")
    if not scales:
        return wrong_value(rng, one, other)
    changed = bytearray(one.payload)
    at = len(changed) - 4 * int(rng.integers(1, scales + 1))
    changed[at : at + 4] = np.float32(rng.choice([0.0, -0.0, -1.0, math.nan])).tobytes()
    return bytes(changed), False


MUTATIONS: list[Callable[[Rng, Original, Original], Mutant]] = [
    flip_bits,
    cut,
    grow,
    drop_piece,
    noise,
    too_big,
    cross,
    wrong_length,
    wrong_fact,
    wrong_about,
    wrong_header,
    wrong_value,
    wrong_scale,
]


def second_opinion(chain: BlockChain, state: Tensors, payload: bytes) -> str:
    """What is wrong with an update, by other means than the contract's; empty if nothing."""
    tensors = load(payload)
    about = json.loads(_about(payload))
    assert (about["round"] - 1, about["nonce"], about["state"]) == REQUEST, "of another request"
    start, stop = about["span"]
    own: Tensors = {}
    for block in list(chain.blocks)[start:stop]:
        own |= block_state(block)
    expected = sum(t.numel() for t in own.values())
    if set(tensors) - {"scales"} != {"F32"} or tensors["F32"].shape != (expected,):
        return "not the values of its span"
    if not 1 <= about["samples"] <= MAX_SAMPLES or not math.isfinite(about["loss"]):
        return "samples or loss"
    scales = tensors.get("scales", torch.ones(0))
    if len(scales) != bin(int(about["scales"], 16)).count("1") or not bool(
        ((scales >= 1e-20) & (scales <= 1e6)).all()
    ):
        return "scales"
    if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
        return "not finite"
    before = torch.cat([state[key].flatten() for key in own]).double()
    moved = float((tensors["F32"].double() - before).norm())
    if moved > MAX_CHANGE * (1 + float(before.norm())) * (1 + 1e-9):
        return "too far away"
    return ""


def _about(payload: bytes) -> str:
    end = 8 + int.from_bytes(payload[:8], "little")
    text: str = json.loads(payload[8:end])["__metadata__"]["cocofl"]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chain, state, originals = real_updates()
    contract = Contract(chain, max_samples=MAX_SAMPLES, max_change=MAX_CHANGE)
    for original in originals:
        span, received = contract.decode(original.payload, state, REQUEST)
        assert contract.encode(received, REQUEST) == original.payload, span
        assert not second_opinion(chain, state, original.payload)
    rng = np.random.default_rng(arguments.seed)
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    begin = time.perf_counter()
    for number in range(arguments.count):
        one, other = (originals[int(i)] for i in rng.integers(len(originals), size=2))
        mutation = MUTATIONS[number % len(MUTATIONS)]
        payload, may_pass = mutation(rng, one, other)
        if payload in (one.payload, other.payload):
            outcomes["unchanged"] += 1
            continue
        try:
            _, received = contract.decode(payload, state, REQUEST)
        except RejectedUpdate as error:
            outcomes[f"rejected: {error.reason}"] += 1
            continue
        except Exception as error:
            wrong.append(f"{mutation.__name__} {number}: {error!r}")
            continue
        outcomes["accepted"] += 1
        opinion = second_opinion(chain, state, payload) if may_pass else "must not pass"
        merged = Mean("everyone")(ServerState(state), [received]).tensors
        if not all(bool(torch.isfinite(t).all()) for t in merged.values()):
            opinion = "the merge is not finite"
        if opinion:
            wrong.append(f"{mutation.__name__} {number}: accepted, but {opinion}")
    seconds = time.perf_counter() - begin
    print(
        json.dumps(
            {
                "mutants": arguments.count,
                "originals": len(originals),
                "seconds": round(seconds, 1),
                "outcomes": dict(sorted(outcomes.items())),
                "wrong": wrong[:20],
            },
            indent=1,
        )
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
