"""Devices without a network: a grid that hands messages straight to functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from cocofl.flower import client, server
from cocofl.runlog import RunFolder

Node = Callable[[Message], Message | None]


class Direct(Grid):
    """A grid whose nodes are functions; a node that returns None does not answer."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes, self.replies = nodes, {}
        self.sent: list[Message] = []
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Any: ...

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            name = str(len(self.sent))
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            self.replies[name] = self.nodes[message.metadata.dst_node_id](message)
            ids.append(name)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        (name,) = message_ids
        reply = self.replies[name]
        if isinstance(reply, Exception):
            raise reply
        return [] if reply is None else [reply]

    def send_and_receive(self, *args: Any, **kwargs: Any) -> Any: ...


def device(number: int, of: int = 2, **config: Any) -> Node:
    """An honest device with its own node config."""
    node_config = {"partition-id": number, "num-partitions": of, **config}

    def answer(message: Message) -> Message:
        context = Context(1, number, node_config, RecordDict(), {})
        return client.app(message, context)

    return answer


def play(
    folder: Path, nodes: dict[int, Node], config: Mapping[str, Any], kind: type[Direct] = Direct
):
    """A run on such a grid: the final state, its rounds, the grid."""
    grid = kind(nodes)
    config = {**config, "flower.folder": str(folder)}
    server.main(grid, Context(1, 1, {}, RecordDict(), config))
    run = RunFolder(folder)
    return run.model(), run.rounds(), grid
