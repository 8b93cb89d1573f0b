"""The data sets by name, and loading them: from the cache, else from their origin."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from cocofl.data import data_files
from cocofl.data import origin as origins
from cocofl.data.given import UserData
from cocofl.data.origin import Origin
from cocofl.data.samples import PARTS, Facts, NewSamples, Samples, open_samples, write_samples
from cocofl.data.user_data import call_own, new_parts
from cocofl.errors import DataNotFound, InvalidData
from cocofl.hub import is_hugging_face, split_name
from cocofl.named import import_ours, nearest

logger = logging.getLogger("cocofl.data")

PRESETS = ("standard", "paper")


class LibraryMissing(DataNotFound):
    """Reading data from its origin needs a library that is not installed."""


@dataclass(frozen=True)
class Source:
    """A data set that can be loaded by name."""

    build: str
    """The ``module:function`` in here that reads it, as a name: its libraries are imported only
    when something has to be built, for a warm start needs none of them."""
    samples: tuple[int, int]
    """How many there are to train and to test, as published; what is here may be less."""
    num_classes: int
    task: Literal["image", "text"]
    hub: str = ""
    """The repository on the Hub, also the folder to look for; empty when the Hub has none."""
    folders: tuple[str, ...] = ()
    """Other folders it may be in below the data folder, in formats of its own."""
    package: str = ""
    """Set when the data ships with a Python package."""
    how_to_get: str = ""


REGISTRY: dict[str, Source] = {
    "digits": Source("digits:digits", (1_438, 359), 10, "image", package="scikit-learn"),
    "cifar10": Source("vision:cifar10", (50_000, 10_000), 10, "image", "uoft-cs/cifar10"),
    "cifar100": Source("vision:cifar100", (50_000, 10_000), 100, "image", "uoft-cs/cifar100"),
    "cinic10": Source(
        "vision:cinic10", (90_000, 90_000), 10, "image", "flwrlabs/cinic10", ("cinic10", "CINIC-10")
    ),
    "femnist": Source(
        "vision:femnist", (651_422, 162_855), 62, "image", "flwrlabs/femnist", ("femnist",)
    ),
    "fashion_mnist": Source(
        "vision:fashion_mnist", (60_000, 10_000), 10, "image", "zalando-datasets/fashion_mnist"
    ),
    "xchest": Source(
        "vision:xchest",
        (86_524, 25_596),
        2,
        "image",
        folders=("nih-chest-xray",),
        how_to_get="unpack NIH's ChestX-ray14 into FOLDER/nih-chest-xray",
    ),
    "imdb": Source("language:imdb", (25_000, 25_000), 2, "text", "stanfordnlp/imdb"),
    "shakespeare": Source(
        "language:shakespeare",
        (3_311_034, 770_429),
        82,
        "text",
        "flwrlabs/shakespeare",
        ("shakespeare",),
    ),
}

Folder = str | os.PathLike[str] | None


@dataclass(frozen=True)
class DataSet:
    """A data set ready to train on and to test with."""

    name: str
    train: Samples
    test: Samples

    @property
    def facts(self) -> Facts:
        """What there is to know besides the samples: task, classes, normalisation."""
        return self.train.facts


@dataclass(frozen=True)
class Listing:
    """What is known of a data set without loading it."""

    name: str
    task: str
    train_samples: int
    test_samples: int
    num_classes: int
    state: Literal["ready", "here", "hub", "missing"]
    """Cached; in a folder or package of this machine; on the Hub; or none of these."""
    place: str
    """Where it is, or how to get it."""


def load(
    name: str | UserData = "digits",
    *,
    data_dir: Folder = None,
    preset: str = "standard",
    options: Mapping[str, Any] | None = None,
) -> DataSet:
    """Load a data set by name, or one's own: a path, ``hf:NAME``, or ``package.module:function``.

    From the cache if it is there, whole and made of the same files; otherwise from ``data_dir``
    (or the folders in ``COCOFL_DATA``), or, when neither is given, from the Hub. One's own function
    is called every time, since nobody else knows whether its data has changed; the file, under a
    checksum of its content, serves to share the arrays between worker processes.

    ``options`` say how a path or ``hf:NAME`` is read (see :class:`~cocofl.data.given.UserData`), or
    are further keyword arguments of one's own function.
    """
    options = options or {}
    if isinstance(name, UserData):
        return _load_own("data", name)
    if data_files.is_path(name):
        return _load_path(name, data_dir, options)
    if is_hugging_face(name):
        return _load_hub(name, data_dir, options)
    if ":" in name:
        roots = origins.data_dirs(data_dir)
        return _load_own(name, call_own(name, roots[0] if roots else None, options))
    source = find_source(name)
    if options:
        raise DataNotFound(
            f"data.options are for data of your own, a path or package.module:function; {name} "
            "takes none"
        )
    if preset not in PRESETS:
        raise DataNotFound(f"no preset {preset!r}; choose one of {', '.join(PRESETS)}")
    origin = locate(name, source, data_dir)
    paths = cache_paths(name, origin, preset)
    return _load_or_build(name, paths, lambda: _builder(source)(origin, preset))


def _load_own(name: str, data: UserData) -> DataSet:
    parts, checksum = new_parts(data, name)
    return _load_or_build(name, _own_paths(name, checksum), lambda: nullcontext(parts))


def _load_path(name: str, data_dir: Folder, options: Mapping[str, Any]) -> DataSet:
    path = data_files.find(name, origins.data_dirs(data_dir))
    data = UserData.with_options(path, options)
    known = data_files.fingerprint(path, options)
    build = lambda: nullcontext(new_parts(data, name)[0])  # noqa: E731
    return _load_or_build(name, _own_paths(path.name, known), build)


def _load_hub(name: str, data_dir: Folder, options: Mapping[str, Any]) -> DataSet:
    """A data set of Hugging Face's, its columns as its features say."""
    find = import_with_library("hub_data:hub_folder")
    folder = find(name, origins.data_dirs(data_dir))
    data = UserData.with_options(None, options)
    known = data_files.fingerprint(folder, {**options, "": split_name(name)[1]})

    @contextmanager
    def build() -> Iterator[dict[str, NewSamples]]:
        with import_with_library("hub_data:hub_data")(name, folder, data) as told:
            yield new_parts(told, name)[0]

    return _load_or_build(name, _own_paths(name, known), build)


def find_source(name: str) -> Source:
    """The registry's entry, or an error that names the nearest one."""
    if name in REGISTRY:
        return REGISTRY[name]
    raise DataNotFound(
        f"no data set {name!r}{nearest(name, REGISTRY)}; known: {', '.join(REGISTRY)}; or one's "
        "own as package.module:function, or a path (data.csv, data.npz, ./folder)"
    )


def locate(name: str, source: Source, data_dir: Folder) -> Origin:
    """The origin a data set would be read from, or an error that says how to get it."""
    if source.package:
        try:
            return Origin(None, f"{source.package} {version(source.package)}")
        except PackageNotFoundError as error:
            raise DataNotFound(
                f"this data ships with {source.package}: pip install {source.package}"
            ) from error
    roots = origins.data_dirs(data_dir)
    wanted = [folder for folder in (source.hub, *source.folders) if folder]
    for root in roots:
        for folder in wanted:
            if (root / folder).is_dir():
                return Origin(root / folder)
    if roots:
        raise DataNotFound(
            f"{name} is not in {', '.join(str(root) for root in roots)}: looked for the folder "
            f"{' or '.join(wanted)}. Put it there, or name another data folder "
            f"({origins.NAMING_A_FOLDER})"
            + ("; with neither, it is loaded from the Hub." if source.hub else ".")
        )
    if not source.hub:
        raise DataNotFound(
            f"{name} is not on the Hub: {source.how_to_get}, then name the folder: "
            f"{origins.NAMING_A_FOLDER}"
        )
    return Origin(None, source.hub)


def listing(name: str, *, data_dir: Folder = None) -> Listing:
    """Where a data set would come from here, and how large it is, without loading it."""
    source = find_source(name)
    known = Listing(name, source.task, *source.samples, source.num_classes, "missing", "")
    roots = origins.data_dirs(data_dir)
    try:
        origin = locate(name, source, data_dir)
    except DataNotFound:
        get = f"download {source.hub} from the Hub into {roots[0]}/{source.hub}" if roots else ""
        return replace(known, place=source.how_to_get or get)
    paths = cache_paths(name, origin)
    place = f"with {source.package}" if source.package else str(origin.folder or origin.hub)
    try:
        train, test = (open_samples(paths[part]) for part in PARTS)
    except InvalidData:
        at_hand = bool(source.package or origin.folder)
        return replace(known, state="here" if at_hand else "hub", place=place)
    sizes = len(train), len(test), train.facts.num_classes
    return Listing(name, source.task, *sizes, "ready", place)


def _builder(
    source: Source,
) -> Callable[[Origin, str], AbstractContextManager[dict[str, NewSamples]]]:
    found: Callable[..., AbstractContextManager[dict[str, NewSamples]]]
    found = import_with_library(source.build)
    return found


def import_with_library(name: str) -> Any:
    """A ``module:function`` in here; an error that says which library it lacks."""
    try:
        return import_ours(f"cocofl.data.{name}", DataNotFound)
    except DataNotFound as error:
        cause = error.__cause__
        if not isinstance(cause, ModuleNotFoundError):
            raise
        library = (cause.name or "").partition(".")[0]
        raise LibraryMissing(
            f"cocofl.data.{name} needs the library {library}: pip install 'cocofl[data]'"
        ) from cause


# --- caching -------------------------------------------------------------------------------------


def cache_paths(name: str, origin: Origin, preset: str = PRESETS[0]) -> dict[str, Path]:
    """Where the parts of a data set by name lie once they have been read from their origin."""
    return _paths(name, f"{preset}-{origin.fingerprint()}")


def _paths(name: str, key: str) -> dict[str, Path]:
    return {part: origins.cache_dir() / name / f"{key}-{part}.safetensors" for part in PARTS}


def _own_paths(name: str, key: str) -> dict[str, Path]:
    return _paths(f"own/{re.sub(r'[^A-Za-z0-9._-]', '.', name)[-80:]}", key)


def _load_or_build(
    name: str,
    paths: dict[str, Path],
    build: Callable[[], AbstractContextManager[dict[str, NewSamples]]],
) -> DataSet:
    """Open all parts of a data set, or build all of them when one is missing or broken.

    Together, because they share statistics and tokenizer: old and new would not fit each other.
    """
    if all(path.exists() for path in paths.values()):
        try:
            return DataSet(name, *(open_samples(paths[part], verify=True) for part in PARTS))
        except InvalidData as error:
            logger.warning("rebuilding a broken cache: %s", error)
    try:
        with build() as parts:
            statistics = write_samples(paths["train"], parts["train"])
            facts = replace(parts["test"].facts, mean=statistics.mean, std=statistics.std)
            write_samples(paths["test"], replace(parts["test"], facts=facts))
    except LibraryMissing as error:
        raise LibraryMissing(
            f"{name} has to be converted first, for there is no {paths['train']}: {error}"
        ) from error
    except OSError as error:
        raise InvalidData(
            f"could not convert the data into {paths['train'].parent}: {error}. Is there space, "
            f"and may you write there? {origins.CACHE_VARIABLE} names another folder."
        ) from error
    return DataSet(name, *(open_samples(paths[part]) for part in PARTS))
