"""States as safetensors: as bytes, and in files that say after how many rounds.

A file has a checksum of all that is in it. Nothing in it is executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from cocofl.errors import InvalidState
from cocofl.files import check_plain, replacing

State = dict[str, Tensor]

MOST_STATE_BYTES = 64 * 2**30

_ROUNDS, _CHECKSUM = "rounds", "sha256"
_BLANK = "0" * 64
"""Stands for the checksum while that is computed, of all bytes of the file."""


def state_bytes(state: Mapping[str, Tensor], about: dict[str, str] | None = None) -> bytes:
    """A state as safetensors; equal states give equal bytes."""
    # Here and below, because `import cocofl` costs torch and numpy only.
    from safetensors.torch import save  # noqa: PLC0415

    return save({key: t.contiguous() for key, t in state.items()}, about)


def state_from_bytes(content: bytes) -> State:
    """The state again."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load  # noqa: PLC0415

    try:
        return load(content)
    except (SafetensorError, ValueError) as error:
        raise InvalidState(f"a state of {len(content)} bytes cannot be read: {error}") from error


def write_state(path: Path, rounds_done: int, state: Mapping[str, Tensor]) -> None:
    """Write a state whole or not at all, with rounds done and a checksum."""
    content = _with_checksum(state_bytes(state), {_ROUNDS: str(rounds_done)})
    with replacing(path) as file:
        file.write(content)


def read_state(path: Path) -> tuple[int, State]:
    """Rounds done, and the state; nothing in the file is executed, sizes and checksum are right."""
    with opened(path) as file:
        return rounds_in(file), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _with_checksum(content: bytes, about: Mapping[str, str]) -> bytes:
    """A safetensors file with facts, and a checksum of everything in it beside them."""
    # Put together here, as the library writes several facts in another order every time.
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = {**about, _CHECKSUM: _BLANK}
    header = json.dumps({"__metadata__": metadata, **json.loads(content[8:end])})
    text = header.encode().ljust(-(-len(header) // 8) * 8)
    head = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(head)
    digest.update(memoryview(content)[end:])
    return head.replace(_BLANK.encode(), digest.hexdigest().encode(), 1) + content[end:]


def _check_contents(path: Path, metadata: Mapping[str, str]) -> None:
    """Complain about a file that is not as it was written; one of before checksums is let pass."""
    if _ROUNDS in metadata and (more := metadata.keys() - {_ROUNDS, _CHECKSUM}):
        raise ValueError(f"it is no state of a run, as it says {min(more)[:40]!r} of itself")
    if _CHECKSUM not in metadata:
        return
    with path.open("rb") as file:
        length = file.read(8)
        head = length + file.read(int.from_bytes(length, "little"))
        blank = hashlib.sha256(head.replace(metadata[_CHECKSUM].encode(), _BLANK.encode(), 1))
        if hashlib.file_digest(file, lambda: blank).hexdigest() != metadata[_CHECKSUM]:
            raise ValueError("it was changed after it was written: its checksum is another")


def rounds_in(file: Any) -> int:
    """After how many rounds a file that was opened was written."""
    said: str = (file.metadata() or {}).get(_ROUNDS, "0")
    if not (said.isdecimal() and len(said) < 20):
        raise ValueError(f"it is of round {said[:40]!r}")
    return int(said)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file whose header is sound, whose size is what that says, and its checksum."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        check_plain(path, MOST_STATE_BYTES)
        with safe_open(path, "pt") as file:
            _check_contents(path, file.metadata() or {})
            yield file
    except (OSError, SafetensorError, ValueError) as error:
        raise InvalidState(f"cannot read {path} as safetensors: {error}") from error
