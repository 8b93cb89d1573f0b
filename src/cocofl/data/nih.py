"""NIH's own download of ChestX-ray14: a CSV of findings, two lists of names, folders of images.

Wang et al., *ChestX-ray8* (2017). ``Data_Entry_2017*.csv`` has one row per image;
``train_val_list.txt`` and ``test_list.txt`` divide the images by patient.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from cocofl.errors import DataNotFound, InvalidData

TABLE = "Data_Entry_2017*.csv"
LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}
COLUMNS = ("Image Index", "Finding Labels", "Patient ID")


@dataclass(frozen=True)
class Entry:
    """One X-ray."""

    path: Path
    finding: bool
    patient: str


def is_download(folder: Path) -> bool:
    """Whether a folder is NIH's download."""
    return any(folder.rglob(TABLE))


def read_entries(folder: Path, split: str) -> list[Entry]:
    """The images of one split, in the order of the CSV; every one must be there."""
    wanted = set(_find(folder, LISTS[split]).read_text().split())
    place = {path.name: path for path in folder.rglob("*.png")}
    rows = [row for row in _read_rows(_find(folder, TABLE)) if row[0] in wanted]
    missing = [name for name, _, _ in rows if name not in place]
    if missing or not rows:
        raise DataNotFound(
            f"{folder} lacks {len(missing)} of {len(rows)} images of {LISTS[split]}"
            f"{', like ' + missing[0] if missing else ''}; unpack all of images_*.tar.gz there"
        )
    return [Entry(place[name], labels != "No Finding", patient) for name, labels, patient in rows]


def _read_rows(path: Path) -> list[tuple[str, str, str]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = reader.fieldnames or ()
        if not set(COLUMNS) <= set(found):
            raise InvalidData(
                f"{path} has the columns {', '.join(found)}; expected {', '.join(COLUMNS)}"
            )
        return [(row[COLUMNS[0]], row[COLUMNS[1]], row[COLUMNS[2]]) for row in reader]


def _find(folder: Path, pattern: str) -> Path:
    found = sorted(folder.rglob(pattern))
    if not found:
        raise DataNotFound(f"{folder} has no {pattern}; copy NIH's whole download there")
    return found[0]
