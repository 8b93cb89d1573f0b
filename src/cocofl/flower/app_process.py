"""The process that :mod:`cocofl.flower.node` keeps: a ClientApp, loaded once, answers messages.

It ends with the node: when their sockets close, or, in the middle of training, when its parent is
another one.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from logging import ERROR
from multiprocessing.connection import Connection

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.config import get_fused_config_from_fab
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto, run_from_proto
from flwr.proto.run_pb2 import Run as ProtoRun
from flwr.supercore import log
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from cocofl.flower.node import receive_frames, send_frames


def answer(frames: Sequence[bytes]) -> list[bytes]:
    """The reply to a message, as Flower's own process for a ClientApp makes it."""
    about, run_bytes, fab, message_id, *objects = frames
    names = (name.decode() for name in objects[::2])
    message = inflate_object_from_contents(
        message_id.decode(), dict(zip(names, objects[1::2], strict=True))
    )
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = message_id.decode()
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
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        header = message_to_proto(remove_content_from_message(reply)).SerializeToString()
        tree = get_object_tree(reply).SerializeToString()
        parts = get_all_nested_objects(reply).items()
        return [header, tree, *(b for name, part in parts for b in (name.encode(), part.deflate()))]


@lru_cache(maxsize=1)
def _load(about: bytes, run_bytes: bytes, fab: bytes) -> tuple[ClientApp, Context]:
    """The app of a run, and what it may keep from message to message."""
    node = json.loads(about)
    run: Run = run_from_proto(ProtoRun.FromString(run_bytes))
    install_from_fab(fab, skip_prompt=True)
    load = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    app = load(run.fab_id, run.fab_version, run.fab_hash)
    config = get_fused_config_from_fab(fab, run)
    context = Context(
        run.run_id, node["node_id"], node["node_config"], RecordDict(), config, run.series_id
    )
    return app, context


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Answer messages until the node is gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    while True:
        try:
            frames = receive_frames(pipe)
        except (EOFError, OSError):
            return
        send_frames(pipe, answer(frames))


if __name__ == "__main__":
    main()
