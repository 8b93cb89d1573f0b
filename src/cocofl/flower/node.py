"""A device's end of the network: a SuperNode that keeps the process its ClientApp runs in.

Flower's own ``flower-supernode`` starts a process for every message, which loads libraries, data
and network anew, and looks for messages every three seconds. This one starts such a process when
the first message of an app comes, hands it every further one, and looks more often while rounds
are short. It only carries bytes: messages are opened in the other process
(:mod:`cocofl.flower.app_process`), over a pair of sockets that nobody else can reach.

``cocofl flower node`` runs this file as a program: importing ``cocofl`` would load PyTorch here,
and only the other process needs it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from logging import ERROR, INFO
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.config import parse_config_args
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto, run_to_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore import log
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

# A look for messages costs the server a request: wait a small part of the time waited already.
_WAIT_SHARE, _SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.05, 0.1, 3.0
_IDLE_S = 600.0  # then the app's process gives its memory back
_MOST_BYTES = 2**31


class Link(NamedTuple):
    """What Flower's connection to the SuperLink can do."""

    node_id: int
    receive: Callable[[], tuple[Message, ObjectTree] | None]
    send: Callable[[Message, ObjectTree, float], tuple[set[str], str]]
    get_run: Callable[[int], Run]
    get_fab: Callable[[str, int], Fab]
    pull_object: Callable[[int, str], bytes]
    push_object: Callable[[int, str, str, bytes], None]
    confirm: Callable[[int, str], None]


class AppProcess:
    """The process in which the ClientApp runs, started when there is something for it to do."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._fab = ""

    def ask(self, fab: str, frames: Sequence[bytes], within_s: float) -> list[bytes]:
        """What it answers to a message, in the process that has this app's modules."""
        if self._process is None or self._process.poll() is not None or self._fab != fab:
            self.close()
            self._pipe, theirs = Pipe()
            words = [sys.executable, "-P", "-m", "cocofl.flower.app_process", str(theirs.fileno())]
            self._process = subprocess.Popen(words, pass_fds=[theirs.fileno()])
            theirs.close()
            self._fab = fab
        # One that hangs, or was stopped, neither reads nor writes: killed it does both.
        alarm = Timer(within_s, self._process.kill)
        alarm.start()
        begin = time.monotonic()
        try:
            send_frames(self._pipe, frames)
            return receive_frames(self._pipe)
        except (EOFError, OSError):
            code = self.close()
        finally:
            alarm.cancel()
        if time.monotonic() - begin < within_s:
            raise ChildProcessError(f"the app's process ended with {code}")
        raise TimeoutError(f"the app gave no answer in {within_s:.0f} s; its process was ended")

    def close(self) -> int | None:
        """End it, if there is one; its exit code, negative for a signal."""
        if self._process is None:
            return None
        self._pipe.close()
        self._process.kill()
        code, self._process = self._process.wait(), None
        return code


def send_frames(pipe: Connection, frames: Sequence[bytes]) -> None:
    """How many, then each."""
    pipe.send_bytes(str(len(frames)).encode())
    for frame in frames:
        pipe.send_bytes(frame)


def receive_frames(pipe: Connection) -> list[bytes]:
    """The frames again; one that is too large is an error before it is read."""
    return [pipe.recv_bytes(_MOST_BYTES) for _ in range(int(pipe.recv_bytes(20)))]


def reply_frames(reply: Message) -> list[bytes]:
    """A message without its content, the tree of its objects, and these in the tree's order."""
    reply.metadata.__dict__["_message_id"] = reply.object_id
    with inflatable_object.no_object_id_recompute():
        tree = inflatable_object.get_object_tree(reply)
        objects = inflatable_object.get_all_nested_objects(reply)
        header = message_to_proto(remove_content_from_message(reply)).SerializeToString()
        contents = [objects[name].deflate() for name in object_ids(tree)]
        return [header, tree.SerializeToString(), *contents]


def object_ids(tree: ObjectTree) -> list[str]:
    """The names of a message's objects, in the order in which they are sent."""
    return [part.object_id for part in inflatable_object.iterate_object_tree(tree)]


class Node:
    """Takes messages from the SuperLink to the app's process, and its replies back."""

    def __init__(self, link: Link, config: Mapping[str, Any]) -> None:
        self._link = link
        self._about = json.dumps({"node_id": link.node_id, "node_config": dict(config)}).encode()
        self._app = AppProcess()
        self._run = lru_cache(maxsize=1)(self._fetch_run)

    def serve(self) -> None:
        """Until a signal comes."""
        idle_since = time.monotonic()
        try:
            while True:
                if self._serve_one():
                    idle_since = time.monotonic()
                    continue
                waited_s = time.monotonic() - idle_since
                if waited_s > _IDLE_S:
                    self._app.close()
                time.sleep(min(max(_SHORTEST_WAIT_S, _WAIT_SHARE * waited_s), _LONGEST_WAIT_S))
        finally:
            self._app.close()

    def _serve_one(self) -> bool:
        """Whether there was a message; what goes wrong with one is no reason not to go on."""
        try:
            received = self._link.receive()
            if received is None:
                return False
            self._carry(*received)
        except RunNotRunningException:
            log(INFO, "The run is over; its message is not answered.")
        except Exception as error:
            log(ERROR, "A message was not answered: %r", error)
        return True

    def _carry(self, message: Message, tree: ObjectTree) -> None:
        run_id, message_id = message.metadata.run_id, message.metadata.message_id
        run, fab = self._run(run_id)
        contents = inflatable_utils.pull_objects(
            object_ids(tree),
            partial(self._link.pull_object, run_id),
            initial_backoff=_SHORTEST_WAIT_S,
        )
        self._link.confirm(run_id, message_id)
        begin = time.monotonic()
        frames = [self._about, run, fab.content, tree.SerializeToString()]
        frames += [contents[name] for name in object_ids(tree)]
        contents.clear()
        try:
            answer = self._app.ask(fab.hash_str, frames, message.metadata.ttl)
        except ChildProcessError as error:
            crash = Error(ErrorCode.CLIENT_APP_CRASHED, str(error))
            answer = reply_frames(Message(crash, reply_to=message))
        reply = message_from_proto(ProtoMessage.FromString(answer[0]))
        tree = ObjectTree.FromString(answer[1])
        to_push, session = self._link.send(reply, tree, time.monotonic() - begin)
        objects = zip(object_ids(tree), answer[2:], strict=True)
        inflatable_utils.push_object_contents_from_iterable(
            [(name, content) for name, content in objects if name in to_push],
            partial(self._link.push_object, run_id, session),
        )
        log(INFO, "Answered message %s in %.2f s", message_id, time.monotonic() - begin)

    def _fetch_run(self, run_id: int) -> tuple[bytes, Fab]:
        run = self._link.get_run(run_id)
        return run_to_proto(run).SerializeToString(), self._link.get_fab(run.fab_hash, run_id)


def _keys(path: Path | None) -> tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey] | None:
    if path is None:
        return None
    key = load_ssh_private_key(path.expanduser().read_bytes(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        sys.exit(f"{path} holds no ECDSA key; make one with ssh-keygen -t ecdsa -b 384")
    return key, key.public_key()


def main() -> None:
    """Join the federation, and take part until a signal comes.

    Arguments are those of ``cocofl flower node``, where they are explained.
    """
    parser = argparse.ArgumentParser(prog="cocofl flower node")
    parser.add_argument("--superlink", required=True)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--root-certificates")
    parser.add_argument("--auth-supernode-private-key", type=Path)
    parser.add_argument("--node-config", default="")
    arguments = parser.parse_args()
    key = arguments.auth_supernode_private_key
    if arguments.insecure and (arguments.root_certificates or key):
        parser.error("--insecure goes without certificates and keys, which need TLS")
    config = parse_config_args([arguments.node_config] if arguments.node_config else None)
    # So that the SuperLink is told, and whoever started this sees that it was ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with http_request_response(
        arguments.superlink, arguments.insecure, arguments.root_certificates, _keys(key)
    ) as connection:
        link = Link(*connection)
        log(INFO, "SuperNode ID: %s", link.node_id)
        Node(link, config).serve()
    sys.exit(1)  # Flower has logged why


if __name__ == "__main__":
    main()
