"""``hf:NAME``: a data set in the Hub's layout, parquet only, whose features say what is what.

From a folder here, else from the Hub, of which nothing but parquet files is fetched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub

from cocofl.data.given import INPUTS, LABELS, NEXT_TOKEN, UserData
from cocofl.data.huggingface import Table, local_tables
from cocofl.data.origin import NAMING_A_FOLDER
from cocofl.data.tokenizing import tokenizer_file
from cocofl.errors import DataNotFound, InvalidData
from cocofl.hub import folder_of, split_name

TEST_SPLITS = ("test", "validation")
"""What a network is tested with: the first of these that has labels."""
_SPLITS = ("train", *TEST_SPLITS)
# Where the Hub keeps a copy of what others wrote in another format.
_CONVERTED = "refs/convert/parquet"


def hub_folder(name: str, folders: Sequence[Path]) -> Path:
    """Where the files of a data set are: below a data folder, here, or fetched from the Hub."""
    place, configuration = split_name(name)
    for folder in folders:
        if (folder / place).is_dir():
            return folder / place
    found = folder_of(name, "data set", DataNotFound)
    return _fetched(place, configuration) if found is None else found


@contextmanager
def hub_data(name: str, folder: Path, data: UserData) -> Iterator[UserData]:
    """The tables to train on and to test with, while the context lasts."""
    files = _files(folder, split_name(name)[1], name)
    with local_tables(**files) as tables:
        told = told_by_features(tables["train"].rows.features, data)
        if (file := tokenizer_file(data.tokenizer, folder.parent)) is not None:
            told = replace(told, tokenizer=str(file))
        parts = {"train": tables["train"].rows}
        for split in TEST_SPLITS:
            if split in tables and "test" not in parts and _has_labels(tables[split], told):
                parts["test"] = tables[split].rows
        yield replace(told, source=parts)


def _fetched(repository: str, configuration: str) -> Path:
    wanted = f"{configuration}/*.parquet" if configuration else "*.parquet"
    try:
        for revision in (None, _CONVERTED):
            found = huggingface_hub.snapshot_download(
                repository, repo_type="dataset", revision=revision, allow_patterns=[wanted]
            )
            if next(Path(found).rglob("*.parquet"), None) is not None:
                return Path(found)
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split())[:300]
        raise DataNotFound(
            f"could not load {repository} from the Hub: {said}. Check the name and the network, or "
            f"put its files into FOLDER/{repository} and say {NAMING_A_FOLDER}"
        ) from error
    raise DataNotFound(
        f"{repository} on the Hub has no {wanted}; data sets in other formats, or with code, are "
        "not read"
    )


def _files(folder: Path, configuration: str, name: str) -> dict[str, list[Path]]:
    """The parquet files of each split, of one configuration."""
    known = sorted(path.name for path in folder.iterdir() if path.is_dir())
    if configuration and configuration not in known:
        raise DataNotFound(
            f"{name}: {folder} has no configuration {configuration!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    found: dict[Path, dict[str, list[Path]]] = defaultdict(dict)
    for path in sorted((folder / configuration).rglob("*.parquet")):
        split, place = path.stem.partition("-")[0], path.parent
        if split not in _SPLITS:  # the Hub's own copies: CONFIGURATION/SPLIT/0000.parquet
            split, place = place.name, place.parent
        if split in _SPLITS:
            found[place].setdefault(split, []).append(path)
    found = {place: splits for place, splits in found.items() if "train" in splits}
    if not found:
        raise DataNotFound(
            f"{name}: {folder / configuration} has no file like train.parquet or train-*.parquet, "
            "at any depth; a folder must look like the data set's repository on the Hub"
        )
    if len(found) > 1:
        names = ", ".join(str(place.relative_to(folder)) for place in found)
        raise DataNotFound(f"{name} has several configurations; say which, {name}:ONE of {names}")
    (splits,) = found.values()
    return splits


# --- what columns are ----------------------------------------------------------------------------


def told_by_features(features: Mapping[str, Any], data: UserData) -> UserData:
    """With the columns and the kind of labels that features leave no doubt about."""
    labels = data.labels or _only(features, LABELS, (is_classes, is_class_lists))
    if data.kind == NEXT_TOKEN:
        labels = ()
    inputs = data.inputs
    if not inputs:
        others = {name: one for name, one in features.items() if name not in _listed(labels)}
        inputs = _only(others, INPUTS, (is_image, is_sound, is_words, is_text))
    kind, label = data.kind, features.get(labels) if isinstance(labels, str) else None
    if kind == "auto" and hasattr(label, "feature"):
        by_word = isinstance(inputs, str) and is_words(features.get(inputs))
        kind = "tokens" if by_word else "multilabel" if is_class_lists(label) else kind
    return replace(data, inputs=inputs, labels=labels, kind=kind)


def _only(
    features: Mapping[str, Any], usual: Sequence[str], kinds: Sequence[Callable[[Any], bool]]
) -> str | tuple[()]:
    """A column with a usual name, else the only one of the first kind that there is."""
    if named := [name for name in usual if name in features]:
        return named[0]
    for is_kind in kinds:
        found = [name for name, feature in features.items() if is_kind(feature)]
        if found:
            return found[0] if len(found) == 1 else ()
    return ()


def _listed(names: str | Sequence[str]) -> Sequence[str]:
    return [names] if isinstance(names, str) else names


def is_classes(feature: Any) -> bool:
    """One of named classes."""
    return isinstance(feature, datasets.ClassLabel)


def is_class_lists(feature: Any) -> bool:
    """Several of named classes."""
    return is_classes(getattr(feature, "feature", None))


def is_image(feature: Any) -> bool:
    """Files of images."""
    return isinstance(feature, datasets.Image)


def is_sound(feature: Any) -> bool:
    """Files of sound."""
    return isinstance(feature, datasets.Audio)


def is_text(feature: Any) -> bool:
    """Texts."""
    return getattr(feature, "dtype", "") in ("string", "large_string")


def is_words(feature: Any) -> bool:
    """Texts in words."""
    return is_text(getattr(feature, "feature", None))


def _has_labels(table: Table, data: UserData) -> bool:
    """Whether a split is labelled; of competitions the test part is not, every class is -1."""
    name = data.labels
    if not isinstance(name, str) or name not in table.rows.column_names:
        return data.kind == NEXT_TOKEN or not isinstance(name, str)
    if not is_classes(table.rows.features[name]):
        return True
    if not len(table):
        raise InvalidData(f"{table.where} has no rows")
    return bool((table.ints(name) >= 0).any())
