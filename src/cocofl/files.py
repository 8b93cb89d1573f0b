"""Files: read within a limit, written whole or not at all, and folders that one process writes.

Whoever reads a file gets an ``OSError`` where it is not a plain file of that size, and a
``ValueError`` where it does not say what it should; nothing else, whatever is in it.

A file that is written has the permissions that the user's umask leaves, as any file of the user's.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import re
import secrets
import stat
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 8 * 2**20
"""Of a text that is read whole: JSON may take twenty times as much memory."""
_MOST_WHOLE = 2**64
_MOST_DEPTH = 32

# tomllib takes a time that grows with the square of the parts of a key, which dots join.
_QUOTED = re.compile(r""""(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?""")
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_DEPTH}}}")


def check_plain(path: Path, most_bytes: int) -> int:
    """The size of a plain file; ``OSError`` where it is larger, or a device, a pipe or a folder.

    Nothing is opened, since what is no file may never begin, or never end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    if found.st_size > most_bytes:
        said = f"it has {found.st_size} bytes, and at most {most_bytes} are read"
        raise OSError(errno.EFBIG, said, str(path))
    return found.st_size


def read_limited(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All of a plain file, if that is not too much."""
    check_plain(path, most_bytes)
    with path.open("rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grows meanwhile, or does not tell its size
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def read_lines(path: Path, most_bytes: int, most_in_all: int) -> Iterator[bytes]:
    """The lines of a plain file, one at a time; what has no end of line is not complete."""
    check_plain(path, most_in_all)
    with path.open("rb") as file:
        while (line := file.readline(most_bytes + 1)).endswith(b"\n"):
            yield line[:-1]
    if len(line) > most_bytes:
        raise OSError(errno.EFBIG, f"it has a line of more than {most_bytes} bytes", str(path))


def parsed_json(text: str | bytes) -> Any:
    """What a text in JSON says, in which no key stands twice."""
    try:
        return json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parsed_toml(content: bytes | str) -> dict[str, Any]:
    """What a text in TOML says, whose whole numbers have at most 64 bits."""
    text = content if isinstance(content, str) else content.decode()
    if _DEEP_KEY.search(_QUOTED.sub("_", text)):
        raise ValueError(f"a key has more than {_MOST_DEPTH} parts")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_values(found)
    return found


def read_csv(path: Path, most_bytes: int = MOST_BYTES) -> Iterator[dict[str, str]]:
    """The rows of a CSV file by column, one at a time; a cell that a row lacks is empty."""
    # Spreadsheets begin a file with a mark, which would be part of the first column's name.
    text = read_limited(path, most_bytes).decode("utf-8-sig")
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="", restval="")
    try:
        columns = reader.fieldnames or []
        for mark in ";\t" if len(columns) == 1 else "":
            if mark in columns[0]:
                raise ValueError(
                    f"it looks separated by {mark!r}; expected a comma between cells, and a point "
                    "in numbers like 0.5"
                )
        if len(set(columns)) < len(columns) or "" in columns:
            raise ValueError(f"two columns have one name, or one has none: {str(columns)[:200]}")
        for row in reader:
            if "" in row:
                raise ValueError(f"there are more cells than columns: {str(row[''])[:40]}")
            yield row
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # A log has the same keys in every line: in memory they are there once.
    found = {sys.intern(name): value for name, value in pairs}
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:40]!r} stands there twice")
    return found


def _check_values(content: Any) -> None:
    """Refuse numbers that nobody can compute with, and tables in tables in tables."""
    level: list[Any] = [content]
    for _ in range(_MOST_DEPTH):
        if any(isinstance(one, int) and abs(one) >= _MOST_WHOLE for one in level):
            raise ValueError("a whole number has more than 64 bits")
        tables = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [inner for one in tables if isinstance(one, list) for inner in one]
        if not level:
            return
    raise ValueError("it is nested too deeply")


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name only once it is complete and on the disk.

    A process that dies on the way leaves a stray temporary file and never half a file. A folder
    that is missing is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not one of tempfile's, which others may not read.
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with unfinished.open("xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)  # it may have its name already, when Ctrl-C comes
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())


def append_text(path: Path, text: str) -> None:
    """Add to a log, which is made if need be."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Keep other processes out that ask for the same folder, which is made if need be.

    ``BlockingIOError`` where another has it and one does not ``wait``. The folder itself is locked,
    so nothing is left behind, and whoever is killed has let go of it. Where folders cannot be
    locked (Windows, some network drives) nobody is kept from anything.
    """
    if not folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl  # noqa: PLC0415 - it is not everywhere

    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(held)
