"""Experiments on a machine with a GPU that is at hand for minutes and can fetch nothing.

    python -m tools.borrowed_gpu pack FOLDER experiments/paper/*-rc.toml    # here
    python3 tools/borrowed_gpu.py unpack FOLDER/1 HOME                      # there, part by part
    python3 tools/borrowed_gpu.py save HOME/runs OUT                        # there, before it goes
    python3 tools/borrowed_gpu.py restore OUT runs/paper                    # here

``pack`` makes folders ``FOLDER/1``, ``FOLDER/2``, …, each small enough to be sent by itself: the
data of these experiments as CoCoFL keeps it, and the libraries of the command line. ``unpack``
prints the variables with which ``python3 -m cocofl`` finds all of it. ``save`` puts runs into a few
small files: what was recorded, then checkpoints, then models, as far as the limit goes. Runs
that were cut off go on where they are restored.
"""

from __future__ import annotations

# There, before anything is unpacked, Python's own library is all that this may import.
# ruff: noqa: PLC0415
import argparse
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LIBRARIES = ("rich", "typer")
"""What the command line needs beside torch, numpy and safetensors."""
SAVED_BYTES, SAVED_FILES = 14 * 2**20, 4
RANKS = {"checkpoint.safetensors": 1, "model.safetensors": 2}
"""What is saved after all else, and in which order."""
_PIECE = re.compile(r"(.+)\.(\d+)of(\d+)")


def pack(folder: Path, archives: Iterable[Path], part_bytes: int) -> None:
    """Archives, which are used up, as parts of at most so many bytes."""
    number, room = 0, 0
    for archive in archives:
        for piece in cut(archive, archive.parent / "pieces", part_bytes):
            if piece.stat().st_size > room:
                number, room = number + 1, part_bytes
                (folder / str(number)).mkdir(parents=True)
            room -= piece.stat().st_size
            shutil.move(piece, folder / str(number))
        archive.unlink()
    for part in range(1, number + 1):
        print(folder / str(part), *sorted(path.name for path in (folder / str(part)).iterdir()))


def data_archives(scratch: Path, experiments: Iterable[Path]) -> Iterator[Path]:
    """An archive per data set: what the cache has of it, by the names that it has there.

    The cache goes by the times of a data set's files. There, an empty folder of 1970 is all that
    is left of these.
    """
    from cocofl import Experiment
    from cocofl.data.registry import Origin, cache_paths, find_source
    from cocofl.experiment import load_data

    found = {(one.data.name, one.data.preset): one for one in map(Experiment.load, experiments)}
    for (name, preset), experiment in found.items():
        data, source = load_data(experiment), find_source(name)
        stand_in = scratch / "data" / (source.hub or source.folders[0])
        stand_in.mkdir(parents=True, exist_ok=True)
        os.utime(stand_in, (0, 0))
        there = cache_paths(name, Origin(stand_in), preset)
        archive = scratch / f"{name}-{preset}.tar.xz"
        with packed(archive, distance=data.train.facts.channels) as tar:
            tar.add(stand_in, stand_in.relative_to(scratch))
            tar.add(data.train.path, Path("cache", name, there["train"].name))
            tar.add(data.test.path, Path("cache", name, there["test"].name))
        yield archive


def library_archive(scratch: Path, python: str) -> Path:
    """What the command line needs, for a Python that need not be this one; and our commit."""
    target = ["--target", str(scratch / "libraries"), "--python-version", python]
    only = ["--only-binary=:all:", "--no-compile", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, *only, *LIBRARIES], check=True)
    git = ["git", "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout
    (scratch / "commit").write_text(commit)
    archive = scratch / "libraries.tar.xz"
    with packed(archive) as tar:
        tar.add(scratch / "libraries", "libraries")
        tar.add(scratch / "commit", "commit")
    return archive


@contextmanager
def packed(path: Path, distance: int = 0) -> Iterator[tarfile.TarFile]:
    """A new archive; of images a pixel is like that before it, ``distance`` bytes back."""
    delta = [{"id": lzma.FILTER_DELTA, "dist": distance}] if distance else []
    filters = [*delta, {"id": lzma.FILTER_LZMA2, "preset": 6}]
    with (
        lzma.open(path, "wb", filters=filters) as file,
        tarfile.open(fileobj=file, mode="w|") as tar,
    ):
        yield tar


def cut(path: Path, folder: Path, most_bytes: int) -> list[Path]:
    """A file in pieces whose names say how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = range(1, -(-path.stat().st_size // most_bytes) + 1)
    made = [folder / f"{path.name}.{number}of{len(pieces)}" for number in pieces]
    with path.open("rb") as file:
        for piece in made:
            piece.write_bytes(file.read(most_bytes))
    return made


def joined(folder: Path, into: Path) -> None:
    """Unpack each archive of which all pieces are here, and remove these."""
    into.mkdir(parents=True, exist_ok=True)
    whole: dict[str, dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := _PIECE.fullmatch(path.name):
            whole.setdefault(f"{match[1]} {match[3]}", {})[int(match[2])] = path
    for name, pieces in whole.items():
        if len(pieces) < int(name.split()[1]):
            continue
        with tempfile.TemporaryFile() as file:
            for _, piece in sorted(pieces.items()):
                file.write(piece.read_bytes())
            file.seek(0)
            with lzma.open(file) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
                tar.extractall(into, filter="data")
        for piece in pieces.values():
            piece.unlink()


def unpack(part: Path, home: Path) -> None:
    """Take over one part, and say what has to be set as soon as all are there."""
    waiting = home / "pieces"
    shutil.copytree(part, waiting, dirs_exist_ok=True)
    joined(waiting, home)
    if any(waiting.iterdir()):
        print("not all parts are here yet:", *sorted(path.name for path in waiting.iterdir()))
    if (home / "commit").exists():
        commit = (home / "commit").read_text().strip()
        print(f"export COCOFL_DATA={home}/data COCOFL_CACHE={home}/cache COCOFL_COMMIT={commit}")
        print(f"export PYTHONPATH=src:{home}/libraries")


def save(runs: Path, out: Path) -> None:
    """As much of the folder of runs as goes into the limit, what is needed most first."""
    files = [path for path in runs.rglob("*") if path.is_file()]
    files.sort(key=lambda path: (RANKS.get(path.name, 0), -path.stat().st_mtime))
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary) / "runs.tar.xz"
        room = SAVED_BYTES * SAVED_FILES
        with packed(archive) as tar:
            for path in files:
                # Numbers of a network hardly get smaller, so a file counts as it is.
                if (size := path.stat().st_size) > room:
                    print("left out:", path.relative_to(runs))
                    continue
                room -= size
                tar.add(path, path.relative_to(runs))
        cut(archive, out, SAVED_BYTES)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("pack")
    one.add_argument("folder", type=Path)
    one.add_argument("experiments", type=Path, nargs="+")
    one.add_argument("--python", default="3.12", help="the version of Python there")
    one.add_argument("--part-mib", type=int, default=40, help="the size of a part at most")
    for verb, first, second in (
        ("unpack", "part", "home"),
        ("save", "runs", "out"),
        ("restore", "out", "runs"),
    ):
        two = verbs.add_parser(verb)
        two.add_argument(first, type=Path)
        two.add_argument(second, type=Path)
    asked = parser.parse_args()
    if asked.verb == "pack":
        with tempfile.TemporaryDirectory() as scratch:
            data = data_archives(Path(scratch), asked.experiments)
            libraries = library_archive(Path(scratch), asked.python)
            pack(asked.folder, (*data, libraries), asked.part_mib * 2**20)
    elif asked.verb == "unpack":
        unpack(asked.part, asked.home.absolute())
    elif asked.verb == "save":
        save(asked.runs, asked.out)
    else:
        joined(asked.out, asked.runs)


if __name__ == "__main__":
    main()
