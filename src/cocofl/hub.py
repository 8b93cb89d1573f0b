"""``hf:NAME``: what is Hugging Face's, by the name of a folder here or of a repository on the Hub.

Models and data sets are named so. Neither brings code: weights are safetensors, tables parquet.
"""

from __future__ import annotations

import re
from pathlib import Path

from cocofl.errors import CocoflError

PREFIX = "hf:"
TRUST = "hf"
"""What a device's node config lists to let a server name what is on the Hub."""
_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def is_hugging_face(name: str) -> bool:
    """Whether a name is one of these.

    >>> is_hugging_face("hf:openai-community/gpt2"), is_hugging_face("resnet18")
    (True, False)
    """
    return name.startswith(PREFIX)


def split_name(name: str) -> tuple[str, str]:
    """The place that a name means, and the configuration that it may end with.

    >>> split_name("hf:nyu-mll/glue:sst2"), split_name("hf:stanfordnlp/imdb")
    (('nyu-mll/glue', 'sst2'), ('stanfordnlp/imdb', ''))
    """
    place, _, configuration = name.removeprefix(PREFIX).partition(":")
    return place, configuration


def folder_of(name: str, what: str, error: type[CocoflError]) -> Path | None:
    """The local folder that a name means; None for a name on the Hub."""
    place, _ = split_name(name)
    if place and Path(place).is_dir():
        return Path(place)
    if _NAME.fullmatch(place):
        return None
    raise error(
        f"the {what} {name} is neither a folder here nor a name on the Hub, like "
        f"{PREFIX}openai-community/gpt2"
    )


def with_place(name: str, place: Path) -> str:
    """The same, in a folder."""
    _, configuration = split_name(name)
    return f"{PREFIX}{place}{':' * bool(configuration)}{configuration}"


def title(name: str) -> str:
    """What people call it: of a folder the last part."""
    place = Path(split_name(name)[0])
    return with_place(name, Path(place.name)) if place.is_absolute() else name
