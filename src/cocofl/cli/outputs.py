"""Where results are to go: looked at before the work, which may take hours."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cocofl.errors import InvalidSetting


def check_writable(path: Path, option: str) -> None:
    """Complain about a file, not there perhaps, that the command could not write in the end."""
    try:
        if path.exists():
            path.open("ab").close()
        parents = path.absolute().parents
        # Folders that are missing will be made.
        with tempfile.TemporaryFile(dir=next(folder for folder in parents if folder.exists())):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidSetting(f"cannot write {path}: {reason}; choose another {option}") from error
