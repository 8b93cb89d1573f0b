"""The process that :mod:`cocofl.flower.node` keeps: a ClientApp, loaded once, answers messages.

It ends with the node, when their sockets close, in the middle of training, too.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from logging import ERROR
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.common.config import get_fab_config, get_fused_config_from_fab
from flwr.common.constant import ErrorCode
from flwr.common.serde import run_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.run_pb2 import Run as ProtoRun
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from cocofl.engine.worker import end_with_reader
from cocofl.errors import InvalidSetting
from cocofl.flower.node import object_ids, receive_frames, reply_frames, send_frames
from cocofl.flower.settings import trusted_modules
from cocofl.named import import_function, names_are_data

OUR_APP = "cocofl.flower.client"


def answer(frames: Sequence[bytes]) -> list[bytes]:
    """The reply to a message, as Flower's own process for a ClientApp makes it."""
    about, run_bytes, fab, tree_bytes, *contents = frames
    tree = ObjectTree.FromString(tree_bytes)
    objects = dict(zip(object_ids(tree), contents, strict=True))
    message = inflate_object_from_contents(tree.object_id, objects)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    try:
        app, context = _load(about, run_bytes, fab)
        TaskIdentity.task_id, TaskIdentity.run_id = 1, context.run_id
        TaskIdentity.node_id = context.node_id
        reply = app(message, context)
    except Exception as error:
        log(ERROR, "ClientApp raised an exception", exc_info=error)
        code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        if isinstance(error, LoadClientAppError):
            code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
        reply = Message(Error(code, f"{type(error)}:<'{error}'>"), reply_to=message)
    return reply_frames(reply)


@lru_cache(maxsize=1)
def _load(about: bytes, run_bytes: bytes, fab: bytes) -> tuple[ClientApp, Context]:
    """The app of a run, and what it may keep from message to message."""
    node = json.loads(about)
    run = run_from_proto(ProtoRun.FromString(run_bytes))
    app = load_app(fab, node["node_config"])
    config = get_fused_config_from_fab(fab, run)
    context = Context(
        run.run_id, node["node_id"], node["node_config"], RecordDict(), config, run.series_id
    )
    return app, context


def load_app(fab: bytes, node_config: Mapping[str, Any]) -> ClientApp:
    """The ClientApp that a server's app names: ours, or one whose module this device trusts."""
    name = get_fab_config(fab)["tool"]["flwr"]["app"]["components"]["clientapp"]
    # Last, so that nothing in the server's app is taken for a library.
    sys.path.append(str(install_from_fab(fab, skip_prompt=True)))
    with names_are_data(OUR_APP, *trusted_modules(node_config)):
        app = import_function(name, InvalidSetting)
    if not isinstance(app, ClientApp):
        raise LoadClientAppError(f"{name} is a {type(app).__name__}, not a ClientApp")
    return app


def main() -> None:
    """Answer messages until the node is gone."""
    pipe = Connection(int(sys.argv[1]))
    threading.Thread(target=end_with_reader, args=(pipe.fileno(),), daemon=True).start()
    while True:
        try:
            frames = receive_frames(pipe)
        except (EOFError, OSError):
            return
        send_frames(pipe, answer(frames))


if __name__ == "__main__":
    main()
