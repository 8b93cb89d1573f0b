"""The ClientApp: a device that decides by itself what it trains, and sends only that.

Its node config says what it has and where its data is; none of that leaves the device.

================== ===============================================================================
time               what it may spend: a fraction of full training on its data, or "30s" per round
memory             a fraction, or "200MB"
upload             a fraction, or "1MB"
budget-file        instead of these a TOML file with the same keys, read anew every round
profile            the profile table made on this device, or measured:NAME; default: counted
data-dir           the folder that the data function is given
partition-id       with num-partitions: this device has one part of the data that everybody has
threads            with how many threads it trains; default: what the table was measured with, or 1
kernels            int8 kernels, if not those that are fastest here
secure-aggregation true: never send an update but behind masks (docs/guides/privacy.md)
trust              modules of which the server may name functions: "task other"; default: none;
                   "hf": it may name models and data sets on the Hugging Face Hub
================== ===============================================================================
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from cocofl.allocator import keep_freed_memory
from cocofl.config import Experiment
from cocofl.data.data_files import is_path
from cocofl.errors import InvalidExperiment
from cocofl.experiment import Setup, load_data, machine_plan, remember_plan
from cocofl.fl.codec import ERROR
from cocofl.fl.federation import Situation
from cocofl.fl.privacy import Bounds, clipped, shareable
from cocofl.fl.state import Contribution, Memory, Tensors
from cocofl.fl.strategies import Plan
from cocofl.fl.trainer import Task
from cocofl.flower.records import (
    STATE,
    fingerprint,
    unpacked,
    update_reply,
    with_shared_facts,
)
from cocofl.flower.secure_round import (
    OFFER,
    REVEAL,
    SHARE,
    SecureDevice,
    planned_blocks,
    stage_of,
)
from cocofl.flower.secure_updates import SummableUpdates
from cocofl.flower.settings import LEAST_DEVICES, alike_devices, node_budget, trusted_modules
from cocofl.flower.updates import Contract, Request
from cocofl.freeze import check_state
from cocofl.hub import PREFIX, TRUST, folder_of, is_hugging_face, split_name, with_place
from cocofl.models.hugging_face import RANDOM
from cocofl.named import names_are_data
from cocofl.profiling.table import ProfileTable
from cocofl.rng import stream

NO_TEST = 1e-6
"""The share of a file that a device holds out: one sample, since it is the server that tests."""

logger = logging.getLogger("flwr")  # what is said here is in the log of the SuperNode

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round of one device: plan, train what fits, and send that."""
    state, settings = unpacked(message)
    node, lr = context.node_config, settings.pop("lr")
    sent = fingerprint(message.content.config_records[STATE])
    request = Request(settings.pop("round"), message.metadata.group_id, sent)
    with names_are_data(*trusted_modules(node)):
        device = _device(context.run_id, context.node_id, json.dumps(node), json.dumps(settings))
        stage = stage_of(message.content)
        if stage is None:
            payload = device.play(request, lr, state)
        else:
            payload = device.take_part(*stage, context.state, (request.round_index, lr, state))
    return Message(update_reply(payload), reply_to=message)


@lru_cache(maxsize=1)
def _device(_run_id: int, node_id: int, node: str, settings: str) -> Device:
    """Kept while messages are of one run: `cocofl flower node` keeps the process."""
    return Device(json.loads(node), node_id, json.loads(settings))


class Device:
    """One node: its data, its profile table, its budget."""

    def __init__(self, node: Mapping[str, Any], node_id: int, settings: Mapping[str, Any]) -> None:
        torch.set_num_threads(_threads(node))
        keep_freed_memory()
        self._node = node
        experiment = _own_experiment(Experiment.parse(settings["experiment"]), node)
        dataset = with_shared_facts(load_data(experiment), settings["facts"])
        self._setup = Setup(experiment, dataset)
        self._setup.check_labels()
        self._trainer = self._setup.trainer
        self._trainer.kernels = machine_plan(regions=True)
        self._trainer.calibrates = True
        self._contract = Contract(self._trainer.chain(), codec=self._trainer.codec)
        least = int(settings.get("secure_least", LEAST_DEVICES))
        self._updates = SummableUpdates(self._contract, len(self._trainer.chain()), least)
        self._memory: Memory = {}
        """What the codec has lost so far; gone with the process, which costs accuracy only."""
        if "partition-id" in node:
            self._number = int(node["partition-id"])
            self._indices = self._setup.partition[self._number]
        else:
            self._number = node_id
            self._indices = np.arange(len(dataset.train))

    def play(self, request: Request, lr: float, state: Tensors) -> bytes:
        """The update of a round; empty if nothing fits this device's budget now."""
        if self._node.get("secure-aggregation"):
            raise InvalidExperiment(
                "this device sends nothing unmasked (secure-aggregation in its node config); "
                "set flower.secure_aggregation on the server"
            )
        plan = self._plan(request.round_index)
        if plan is None:
            return b""
        return self._contract.encode(self._train(plan, request.round_index, lr, state), request)

    def take_part(
        self, stage: str, payload: bytes, kept: RecordDict, asked: tuple[int, float, Tensors]
    ) -> bytes:
        """A stage of secure aggregation; empty if nothing fits this device's budget now."""
        (round_index, lr, state), secure = asked, SecureDevice(self._updates, kept)
        if stage == SHARE:
            return secure.share(payload)
        if stage == REVEAL:
            return secure.reveal(payload)
        plan = self._plan(round_index)
        if plan is None:
            return b""
        if stage == OFFER:
            return secure.offer(planned_blocks(plan.work))
        return secure.mask(payload, lambda: self._train(plan, round_index, lr, state), state)

    def _plan(self, round_index: int) -> Plan | None:
        """What fits this device's budget now."""
        experiment, number = self._setup.experiment, self._number
        steps = experiment.training.steps(len(self._indices))
        budget = node_budget(self._node, steps * experiment.training.batch)
        rng = stream(experiment.seed, "select", round_index, number)
        return self._setup.strategy.plan(Situation(number, round_index, budget, rng, steps))

    def _train(self, plan: Plan, round_index: int, lr: float, state: Tensors) -> Contribution:
        """What the device contributes, as far as others may know it."""
        experiment, number = self._setup.experiment, self._number
        check_state(self._trainer.chain(), state, None)
        seed, indices = experiment.seed, self._indices
        task = Task(seed, round_index, number, indices, plan.work, lr, self._memory)
        begin = time.perf_counter()
        own = self._trainer.server_state(state)
        contribution = self._trainer.train(task, own)
        spent_s = time.perf_counter() - begin
        logger.info("round %s: trained %.3f s, process %s", round_index + 1, spent_s, os.getpid())
        self._memory = {ERROR: contribution.memory.get(ERROR, {})}
        if contribution.memory.keys() - {ERROR}:
            raise InvalidExperiment(
                f"strategy {experiment.strategy.name!r} lets devices remember something from round "
                "to round, which only a simulation can do"
            )
        remember_plan(self._trainer.kernels)
        if not experiment.privacy.is_on:
            return contribution
        # Where the server sees sums only, nobody else can clip this.
        bounds = Bounds.of_trainer(self._trainer, experiment.privacy)
        return clipped(shareable(contribution), own, bounds)


def _threads(node: Mapping[str, Any]) -> int:
    """As the device is told; else as its table was measured, whose seconds are for that many."""
    if "threads" in node or "profile" not in node:
        return int(node.get("threads", 1))
    hardware = ProfileTable.load(str(node["profile"])).hardware
    return hardware.threads if hardware is not None else 1


def _own_experiment(experiment: Experiment, node: Mapping[str, Any]) -> Experiment:
    """The server's experiment with what is this device's own affair."""
    if "partition-id" in node:
        experiment = alike_devices(experiment, int(node["num-partitions"]))
    name, options = _own_files(experiment, node)
    changes = {
        "data.name": name,
        "data.options": options,
        "model.name": _own_place(experiment.model.name, node, "model"),
        # Weights come from the server.
        "model.init": RANDOM,
        "data.dir": str(node.get("data-dir", "")),
        "tables.spans": str(node.get("profile", "auto")),
        "tables.checkpointed": "auto",
        "engine.kernels": str(node.get("kernels", experiment.engine.kernels)),
    }
    return experiment.changed(changes)


def _own_place(name: str, node: Mapping[str, Any], what: str) -> str:
    """The name of a model or of data; a folder is looked for here, nothing downloaded unasked."""
    if not is_hugging_face(name):
        return name
    own = Path(split_name(name)[0]).name
    place = Path(str(node.get("data-dir", ""))) / own
    if "data-dir" in node and own not in ("", "..") and place.is_dir():
        return with_place(name, place)
    if TRUST in trusted_modules(node) and folder_of(name, what, InvalidExperiment) is None:
        return name
    raise InvalidExperiment(
        f"the server names the {what} {PREFIX}{own}, and this device does not have it: put the "
        f"folder {own!r} into data-dir of its node config, or let it be loaded from the Hub by "
        "trust = 'hf'"
    )


def _own_files(experiment: Experiment, node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The data's name and options; of a file only its name is the server's to say, not where."""
    name, options = experiment.data.name, dict(experiment.data.options)
    if is_hugging_face(name):
        return _own_place(name, node, "data set"), _own_reading(options, node)
    if not is_path(name):
        return name, options
    own = Path(name).name
    if "data-dir" not in node or own in ("", ".."):
        raise InvalidExperiment(
            f"the server names the file {own!r}, and this device does not say where that is; "
            "put data-dir into its node config"
        )
    return str(Path(str(node["data-dir"])) / own), _own_reading(options, node)


def _own_reading(options: Mapping[str, Any], node: Mapping[str, Any]) -> dict[str, Any]:
    """How files are read here: all to train on, by a tokenizer that lies beside them."""
    own = dict(options)
    if "partition-id" not in node:
        own["test"] = NO_TEST
    if isinstance(tokenizer := own.get("tokenizer"), str):
        own["tokenizer"] = Path(tokenizer).name
    return own
