"""A device's own file: which server it belongs to, by which key, and what it has.

``cocofl flower device`` writes it, ``cocofl flower node --file`` joins with it. It is TOML with the
words of Flower's options::

    superlink = "fl.example.org:8000"
    root-certificates = "ca.crt"
    auth-supernode-private-key = "key"

    [node-config]
    trust = "task"
    memory = "200MB"

A relative path of certificates and key is relative to the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cocofl.config import from_table
from cocofl.errors import InvalidSetting
from cocofl.files import parsed_toml, read_limited, write_text
from cocofl.flower.settings import toml_value

CONFIG = "node-config"
_HEAD = "# What this device joins with: `cocofl flower node --file THIS-FILE`.\n"
_MOST_BYTES = 2**16
_MOST_PORT = 2**16 - 1


@dataclass(frozen=True)
class NodeFile:
    """How a device joins."""

    superlink: str = ""
    root_certificates: str = ""
    auth_supernode_private_key: str = ""
    insecure: bool = False
    node_config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        host, _, port = self.superlink.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or int(port) > _MOST_PORT:
            raise InvalidSetting(
                f"superlink is {self.superlink!r}; expected the server's address, HOST:PORT"
            )
        if self.insecure and (self.root_certificates or self.auth_supernode_private_key):
            raise InvalidSetting("insecure goes without certificates and keys, which need TLS")
        for key, value in self.node_config.items():
            if not isinstance(value, bool | int | float | str):
                raise InvalidSetting(
                    f"{key} in {CONFIG} is {value!r:.80}; expected a number, a text, true or false"
                )

    @classmethod
    def load(cls, path: Path) -> NodeFile:
        """Read a file; relative paths in it become absolute."""
        try:
            content = parsed_toml(read_limited(path, _MOST_BYTES))
        except (OSError, ValueError) as error:
            raise InvalidSetting(f"cannot read the node file {path}: {error}") from error
        config = content.pop(CONFIG, {})
        named = {key.replace("-", "_"): value for key, value in content.items()}
        for key in ("root_certificates", "auth_supernode_private_key"):
            if named.get(key):
                named[key] = str(path.absolute().parent / str(named[key]))
        found: NodeFile = from_table(cls, {**named, "node_config": config}, f"{path}: ")
        return found

    def save(self, path: Path) -> None:
        """Write it, whole or not at all."""
        content = asdict(self)
        config = content.pop("node_config")
        top = {key.replace("_", "-"): value for key, value in content.items() if value}
        sections = (_lines(top), f"\n[{CONFIG}]\n", _lines(config))
        write_text(path, _HEAD + "".join(sections))

    def words(self) -> list[str]:
        """The same as options of a SuperNode, ours or Flower's."""
        options = {
            "--root-certificates": self.root_certificates,
            "--auth-supernode-private-key": self.auth_supernode_private_key,
            "--node-config": config_text(self.node_config),
        }
        given = [word for name, value in options.items() if value for word in (name, value)]
        return ["--superlink", self.superlink, *given, *["--insecure"] * self.insecure]


def config_text(config: Mapping[str, Any]) -> str:
    """A node config as Flower's option takes it.

    >>> config_text({"trust": "task", "memory": 0.5})
    'trust="task" memory=0.5'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{key} = {toml_value(value)}\n" for key, value in table.items())
