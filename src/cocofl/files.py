"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that gets its name only once it is complete and on the disk.

    A process that dies on the way leaves a stray temporary file and never half a file. A folder
    that is missing is made.
    """
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
