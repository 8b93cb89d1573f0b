"""The ServerApp: rounds over a real network, with devices that nobody trusts.

The server broadcasts its state, waits, checks every reply against the contract, merges what
passes, evaluates, and writes the round down before the next one begins. It learns which blocks a
device trained, and nothing of what the device has.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from cocofl.accounting import Sampling
from cocofl.config import Experiment
from cocofl.engine.executor import QUARANTINED, Answer, Executor, RoundPlan
from cocofl.engine.rounds import Verdict, run
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Setup, open_folder
from cocofl.fl.metrics import MetricFacts, Populations
from cocofl.fl.privacy import system_noise
from cocofl.fl.state import Contribution, ServerState
from cocofl.flower.quarantine import Quarantine
from cocofl.flower.records import UPDATE, fingerprint, packed, shared_facts, state_record
from cocofl.flower.replies import Reply, ask
from cocofl.flower.secure_round import SecureRound, with_stage
from cocofl.flower.secure_updates import SummableUpdates
from cocofl.flower.settings import (
    Deployment,
    alike_devices,
    check_experiment,
    check_privacy,
    read_run_config,
    with_sensible_rules,
)
from cocofl.flower.updates import Contract, Request
from cocofl.freeze import KernelPlan
from cocofl.rng import stream
from cocofl.runlog import FATES, RoundRecord

logger = logging.getLogger("flwr")  # what is said here is in the log that `flwr log` shows

# A message outlives its round a little: Flower's account of an expired one is no device's error.
GRACE_S = 10.0
_EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Play all rounds that the run folder does not have yet."""
    experiment, deployment = read_run_config(context.run_config)
    server = Server(grid, experiment, deployment)
    with open_folder(Path(deployment.folder), experiment, resume=deployment.resume) as folder:
        if not folder.is_complete:
            folder.write_about(server.setup.about())
            folder.rewind()  # a round that was not kept as a whole is played again
            for record in folder.rounds():
                server.quarantine.add(record)
            log = _Log(server.job.trainer.tally.metrics[0].facts, server.quarantine)
            run([(server.job, folder, [log])], server, KernelPlan())


class _Log:
    """Says how rounds went, and whom an operator should look at."""

    def __init__(self, headline: MetricFacts, quarantine: Quarantine) -> None:
        self._headline, self._quarantine = headline, quarantine
        for node in quarantine.held:
            self._say_held(node)

    def on_round(self, record: RoundRecord) -> None:
        counts = [f"{n} {fate}" for fate in FATES if (n := record.count(fate))]
        said = [*(counts or ["nobody answered"]), *self._headline.found_in(record.scores)]
        logger.info("round %s: %s", record.round, ", ".join(said))
        for node, reason in record.reasons or ():
            logger.warning("node %s: %s", node, reason)
        for one in record.figures or ():
            if one.outlier:
                logger.warning(
                    "node %s: outlier: its change is %.3g times the usual, scales move by %.3g, "
                    "loss %.3g, %s samples",
                    *(one.device, one.against_median, one.scale_change, one.loss, one.samples),
                )
        for node in self._quarantine.add(record):
            self._say_held(node)

    def _say_held(self, node: int) -> None:
        rounds = ", ".join(map(str, self._quarantine.held[node]))
        said = "node %s: quarantined: an outlier in rounds %s (flower.quarantine); not asked again"
        logger.warning(said, node, rounds)

    def on_end(self) -> None:
        """Nothing to add."""


class Server(Executor):
    """The devices of a network: they plan by themselves, and what they send is judged here."""

    def __init__(self, grid: Grid, experiment: Experiment, deployment: Deployment) -> None:
        super().__init__()
        check_experiment(experiment)
        experiment = with_sensible_rules(experiment, deployment)
        self._grid, self._deployment = grid, deployment
        # Who the devices are, and what they have, is not for the server to say.
        own = replace(alike_devices(experiment, 1), merge=experiment.merge.deployed)
        self.setup = Setup(own.changed({"data.split": "iid"}))
        self._contract = Contract(
            self.setup.chain,
            self.setup.trainer.codec,
            max_samples=deployment.max_samples,
            max_change=deployment.max_change,
        )
        classes = self.setup.data.facts.num_classes
        uniform = np.full((1, classes), 1 / classes)
        self.job = replace(
            self.setup.plain_job(),
            federation=None,  # devices plan by themselves, and no server knows of groups
            populations=Populations((), uniform[:0], uniform),
            deadline_s=0.0,
            checkpoint_every=1,  # a server may be killed at any time: whoever resumes loses nothing
            judge=self._judge,
            sees_devices=not deployment.secure_aggregation,
        )
        self._updates: SummableUpdates | None = None
        """How updates are added up, where the server learns sums only."""
        if deployment.secure_aggregation:
            chain, least = self.setup.chain, deployment.secure_least
            self._updates = SummableUpdates(self._contract, len(chain), least)
        merge, codec = self.job.strategy.merge, self.setup.trainer.codec
        check_privacy(experiment, deployment, merge, codec)
        # Whoever is asked knows it, and so does the server: nothing is hidden by chance.
        sampling = Sampling("fixed", deployment.per_round, deployment.per_round)
        clips = not deployment.secure_aggregation
        self.job = self.setup.private(self.job, sampling, system_noise, clips=clips)
        self.quarantine = Quarantine(deployment.quarantine)
        self._requests: dict[int, Request] = {}
        """What each node of the round was asked."""
        facts = shared_facts(self.setup.data)
        self._common: dict[str, Any] = {"experiment": experiment.to_dict(), "facts": facts}
        if self._updates is not None:
            self._common["secure_least"] = deployment.secure_least

    def collect(self, plan: RoundPlan, state: ServerState) -> Iterator[Answer]:
        """Ask the nodes that are there, and wait until they have answered or are late."""
        nodes = self._nodes(plan.round_index)
        record = state_record(state.tensors)
        settings = {**self._common, "round": plan.round_index, "lr": plan.lr}
        timeout_s, size = self._deployment.round_s, record.count_bytes()
        if self._updates is None:
            contents = dict.fromkeys(nodes, packed(record, settings))
            request = Request(plan.round_index, state=fingerprint(record))
            answers = iter(self._exchange(contents, request, timeout_s).values())
        else:
            self._secure = SecureRound(
                self._updates, partial(self._stage, record, settings), timeout_s
            )
            answers = self._secure.collect(nodes, state.tensors)
        for answer in answers:
            yield answer._replace(broadcast_bytes=size)
        for node in sorted(self.quarantine.held.keys() & set(self._grid.get_node_ids())):
            yield Answer(node, None, QUARANTINED)

    def _stage(
        self,
        state: ConfigRecord,
        settings: Mapping[str, Any],
        stages: Mapping[int, ConfigRecord],
        with_state: bool,
        timeout_s: float,
    ) -> dict[int, Answer]:
        """A stage of secure aggregation; only one of them needs the state."""
        record = state if with_state else state_record({})
        content, request = packed(record, settings), Request(settings["round"])
        contents = {node: with_stage(content, stage) for node, stage in stages.items()}
        return self._exchange(contents, request, timeout_s)

    def _exchange(
        self, contents: Mapping[int, RecordDict], request: Request, timeout_s: float
    ) -> dict[int, Answer]:
        """Send each node something, with a nonce of its own, and wait for the answers."""
        self._requests = {node: request._replace(nonce=secrets.token_hex(16)) for node in contents}
        ttl = timeout_s + GRACE_S  # whoever is late must not work through rounds that are over
        messages = [
            # The nonce is the group's name: content that differed would be sent once per node.
            Message(contents[node], node, MessageType.TRAIN, ttl=ttl, group_id=request.nonce)
            for node, request in self._requests.items()
        ]
        replies = ask(self._grid, messages, timeout_s)
        pairs = zip(self._requests.items(), replies, strict=True)
        return {node: _answer(node, request, reply) for (node, request), reply in pairs}

    def _judge(self, answer: Answer, state: ServerState) -> Verdict:
        """What bytes contribute that fulfil the contract; sums have been judged already."""
        if isinstance(answer.sent, Contribution):
            return Verdict(answer.sent, self._secure.work_of(answer.device))
        assert isinstance(answer.sent, bytes)
        request = self._requests[answer.device]
        blocks, contribution = self._contract.decode(answer.sent, state.tensors, request)
        return Verdict(replace(contribution, device=answer.device), str(blocks))

    def _nodes(self, round_index: int) -> list[int]:
        """Whom to ask: all that are there, or some of them at random."""
        settings = self._deployment
        end = time.monotonic() + settings.wait_s
        while len(found := self._trusted_nodes()) < settings.nodes:
            if time.monotonic() > end:
                held = len(self.quarantine.held)
                raise InvalidExperiment(
                    f"after {settings.wait_s:g} s there are {len(found)} nodes"
                    f"{f' beside {held} in quarantine' if held else ''}; round "
                    f"{round_index + 1} needs {settings.nodes} (flower.nodes). What is finished "
                    "is kept: start more, then run again with flower.resume=true"
                )
            time.sleep(0.5)
        if not 0 < settings.per_round < len(found):
            return found
        order = stream(self.job.seed, "sample", round_index).permutation(len(found))
        return sorted(found[index] for index in order[: settings.per_round].tolist())

    def _trusted_nodes(self) -> list[int]:
        return sorted(set(self._grid.get_node_ids()) - self.quarantine.held.keys())


def _answer(node: int, request: Request, reply: Reply) -> Answer:
    """What came back from a node, for the many reasons there are."""
    if isinstance(reply, Message) and not reply.has_error():
        if (reply.metadata.src_node_id, reply.metadata.group_id) != (node, request.nonce):
            return Answer(node, None, "rejected", "request: the reply is to another request")
        return _update(node, reply.content)
    if isinstance(reply, Exception):
        return Answer(node, None, "rejected", f"format: the reply cannot be read: {reply!r:.200}")
    # Where Flower only says that a message is too old, so is whatever comes of it.
    if reply is None or reply.error.code in _EXPIRED:
        return Answer(node, None, "late")
    return Answer(node, None, "lost", f"failed: the device could not: {reply.error.reason:.300}")


def _update(node: int, content: RecordDict) -> Answer:
    """An update as bytes, nothing if the device sits out; any other form is refused."""
    record = content.config_records.get(UPDATE)
    if record is None or set(content) != {UPDATE} or set(record) - {UPDATE}:
        reason = f"format: the reply holds {sorted(content)!r:.200}; expected update"
        return Answer(node, None, "rejected", reason)
    if not record:
        return Answer(node, None, "infeasible")
    payload = record[UPDATE]
    if not isinstance(payload, bytes) or not payload:
        reason = f"format: the update is {payload!r:.40}; expected bytes"
        return Answer(node, None, "rejected", reason)
    return Answer(node, payload)
