"""The ServerApp: rounds over a real network, with devices that nobody trusts.

The server broadcasts its state, waits, checks every reply against the contract, merges what
passes, evaluates, and writes the round down before the next one begins. It learns which blocks a
device trained, and nothing of what the device has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from cocofl.config import Experiment
from cocofl.engine.executor import InProcess
from cocofl.engine.rounds import STATUSES, Job, evaluate
from cocofl.errors import InvalidExperiment, RejectedUpdate
from cocofl.experiment import Setup, open_folder
from cocofl.fl.local import Workshop
from cocofl.fl.merge import Contribution, State
from cocofl.flower.facts import shared_facts
from cocofl.flower.records import Reply, ask, read_update, request, state_record
from cocofl.flower.settings import Deployment, alike_devices, check_strategy, read_run_config
from cocofl.flower.updates import Contract
from cocofl.freeze import KernelPlan
from cocofl.rng import stream
from cocofl.runlog import Record, RunFolder

logger = logging.getLogger("flwr")  # what is said here is in the log that `flwr log` shows

# A message outlives its round a little: Flower's account of an expired one is no device's error.
GRACE_S = 10.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play all rounds that the run folder does not have yet."""
    experiment, deployment = read_run_config(context.run_config)
    server = Server(grid, experiment, deployment)
    path = Path(deployment.folder)
    with open_folder(path, experiment, resume=deployment.resume) as folder:
        serve(server, folder)


def serve(server: Server, folder: RunFolder) -> State:
    """Every round is kept as soon as it is finished: whoever resumes has lost none."""
    if folder.is_complete:
        return folder.model()
    folder.write_about(server.setup.about())
    done, state = folder.rewind() or (0, server.job.initial)
    for round_index in range(done, server.job.rounds):
        state, record, timing = server.play_round(state, round_index)
        folder.append(record, timing)
        folder.save_checkpoint(round_index + 1, state)
        logger.info("round %s: %s", round_index + 1, _summary(record))
    folder.save_model(state, server.job.rounds)
    return state


@dataclass
class _Answer:
    """What became of one node's part in a round."""

    node: int
    fate: str = "late"
    span: str | None = None
    reason: str = ""


class Server:
    """The server's side of a round."""

    def __init__(self, grid: Grid, experiment: Experiment, deployment: Deployment) -> None:
        self._grid, self._deployment = grid, deployment
        # Who the devices are, and what they have, is not for the server to say.
        self.setup = Setup(alike_devices(experiment, 1).changed({"data.split": "iid"}))
        self.job = _without_groups(self.setup.job())
        check_strategy(experiment.strategy.name, self.job.strategy)
        self._contract = Contract(self.setup.chain, deployment.limits)
        self._workshop = Workshop(self.job.materials)
        self._evaluator = InProcess()
        self._evaluator.prepare(self.job.materials, KernelPlan())
        self._common = {
            "experiment": experiment.to_dict(),
            "facts": shared_facts(self.setup.data),
        }

    def play_round(self, state: State, round_index: int) -> tuple[State, Record, Record]:
        """One round: the new state, what is to be known of it, and how long its parts took."""
        begin = time.perf_counter()
        nodes = self._nodes(round_index)
        asked = time.perf_counter()
        record = state_record(state)
        lr = self.job.schedule.at(round_index)
        settings = {**self._common, "round": round_index, "lr": lr}
        timeout_s = self._deployment.round_s
        messages = [
            # Whoever is late must not work through rounds that are over.
            Message(request(record, settings), node, MessageType.TRAIN, ttl=timeout_s + GRACE_S)
            for node in nodes
        ]
        replies = ask(self._grid, messages, timeout_s)
        answers = [_Answer(node) for node in nodes]
        losses: list[float] = []
        bytes_up = 0

        def accepted() -> Iterator[Contribution]:
            nonlocal bytes_up
            for answer, reply in zip(answers, replies, strict=True):
                contribution = self._judge(answer, reply, state)
                if contribution is not None:
                    losses.append(contribution.loss)
                    bytes_up += contribution.nbytes
                    yield contribution

        merged = self.job.strategy.merge(state, accepted(), self._workshop.places)
        trained = time.perf_counter()
        fates = [answer.fate for answer in answers]
        found: Record = {
            "round": round_index + 1,
            "lr": lr,
            "simulated_s": 0.0,
            "bytes_up": bytes_up,
            "bytes_broadcast": len(nodes) * record.count_bytes(),
            "loss": round(float(np.mean(losses)), 6) if losses else None,
            **{status: fates.count(status) for status in STATUSES},
            "devices": [[one.node, "", one.span, one.fate] for one in answers],
            "reasons": [[one.node, one.reason] for one in answers if one.reason],
        }
        if (round_index + 1) % self.job.evaluation.every == 0 or round_index + 1 == self.job.rounds:
            found |= evaluate(self.job, self._evaluator, merged)
        timing = {
            "round": round_index + 1,
            "wait_s": round(asked - begin, 4),
            "train_s": round(trained - asked, 4),
            "evaluate_s": round(time.perf_counter() - trained, 4),
        }
        return merged, found, timing

    def _judge(self, answer: _Answer, reply: Reply, state: State) -> Contribution | None:
        """What a reply contributes; none for the many reasons there are."""
        if reply is None or _is_expiry(reply):
            return None
        try:
            if isinstance(reply, Exception):
                raise RejectedUpdate("format", f"the reply cannot be read: {reply!r:.200}")
            payload = read_update(reply)
            if not payload:
                answer.fate = "infeasible"
                return None
            span, contribution = self._contract.decode(payload, state)
        except RejectedUpdate as error:
            answer.fate = "lost" if error.reason == "failed" else "rejected"
            answer.reason = f"{error.reason}: {error}"
            logger.warning("node %s: %s: %s", answer.node, answer.fate, answer.reason)
            return None
        answer.fate, answer.span = "merged", str(span)
        return contribution

    def _nodes(self, round_index: int) -> list[int]:
        """Whom to ask: all that are there, or some of them at random."""
        settings = self._deployment
        end = time.monotonic() + settings.wait_s
        while len(found := sorted(self._grid.get_node_ids())) < settings.nodes:
            if time.monotonic() > end:
                raise InvalidExperiment(
                    f"after {settings.wait_s:g} s there are {len(found)} nodes; round "
                    f"{round_index + 1} needs {settings.nodes} (flower.nodes). What is finished "
                    "is kept: start more, then run again with flower.resume=true"
                )
            time.sleep(0.5)
        if not 0 < settings.per_round < len(found):
            return found
        order = stream(self.job.seed, "sample", round_index).permutation(len(found))
        return sorted(found[index] for index in order[: settings.per_round].tolist())


def _is_expiry(reply: Reply) -> bool:
    """Whether Flower only says that a message is too old: so is then whatever comes of it."""
    return (
        isinstance(reply, Message)
        and reply.has_error()
        and reply.error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    )


def _without_groups(job: Job) -> Job:
    """Evaluated on the test data as it is: the server knows of no groups."""
    classes = job.materials.test.facts.num_classes
    uniform = np.full((1, classes), 1 / classes)
    evaluation = replace(
        job.evaluation,
        group_names=(),
        group_densities=uniform[:0],
        device_densities=uniform,
    )
    return replace(job, evaluation=evaluation)


def _summary(record: dict[str, Any]) -> str:
    counts = ", ".join(f"{record[status]} {status}" for status in STATUSES if record[status])
    accuracy = f", accuracy {record['accuracy']:.3f}" if "accuracy" in record else ""
    return (counts or "nobody answered") + accuracy
