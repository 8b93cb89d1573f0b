"""Where data is read from: folders of the user's, or the Hub; and where it is cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cocofl.errors import DataNotFound, InvalidData

DATA_VARIABLE = "COCOFL_DATA"
CACHE_VARIABLE = "COCOFL_CACHE"
NAMING_A_FOLDER = f"{DATA_VARIABLE}=FOLDER in the environment, or data.dir in the experiment"
"""What every message that misses data advises: it holds for all commands and for Python."""

# Folders of single images: their names and the folder's own time stand for a quarter of a million
# files, none of which has to be touched to see that nothing has changed.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class Origin:
    """Where a data set is read from: a local folder, else a repository on the Hub or a package."""

    folder: Path | None
    hub: str = ""

    def __str__(self) -> str:
        return str(self.folder) if self.folder else f"the Hub's {self.hub}"

    def fingerprint(self) -> str:
        """Differs when the files differ, so that a cache of other files is never used."""
        digest = hashlib.sha256(f"hub:{self.hub}".encode())
        if self.folder:
            for line in folder_listing(self.folder):
                digest.update(line.encode())
        return digest.hexdigest()[:16]

    def files(self, split: str) -> list[Path]:
        """The files of one split in the Hub's naming: ``train.parquet``, ``train-00000-of-…``."""
        assert self.folder is not None
        found = self.folder.rglob(f"{split}*.parquet")
        return sorted(path for path in found if path.stem.partition("-")[0] == split)


def data_dirs(data_dir: str | os.PathLike[str] | None) -> tuple[Path, ...]:
    """The folders to look into: the one given, else those in ``COCOFL_DATA``; all must exist."""
    if data_dir is not None:
        named, said_by = [os.fspath(data_dir)], "the data folder given"
    else:
        named = [name for name in os.environ.get(DATA_VARIABLE, "").split(os.pathsep) if name]
        said_by = DATA_VARIABLE
    for name in named:
        if not Path(name).is_dir():
            raise DataNotFound(
                f"{said_by} is {name}, but there is no such folder. Create it, or name a folder "
                f"that holds data sets in the Hub's layout ({NAMING_A_FOLDER}); without one, data "
                "comes from the Hub."
            )
    return tuple(Path(name).resolve() for name in named)


def cache_dir() -> Path:
    """Where converted data is kept: ``COCOFL_CACHE``, or the user's own cache folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "cocofl"


def enough(n_wanted: int, n_found: int, what: str, where: str) -> int:
    """``n_wanted``, or an error when a preset asks for more than there is."""
    if n_found < n_wanted:
        raise InvalidData(
            f"the paper's preset takes {n_wanted} {what}, but {where} has {n_found}; "
            'use preset = "standard" for all there is'
        )
    return n_wanted


def folder_listing(folder: Path) -> Iterator[str]:
    """Lines that differ when files are added, removed or changed."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        here = Path(parent)
        yield f"{here.relative_to(folder)}/{here.stat().st_mtime_ns}\n"
        for name in sorted(names):
            if not name.lower().endswith(IMAGE_SUFFIXES):
                state = (here / name).stat()
                yield f"{name}/{state.st_size}/{state.st_mtime_ns}\n"
