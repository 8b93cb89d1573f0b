"""From the names and numbers of an experiment to all that they stand for."""

from __future__ import annotations

import inspect
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocofl import data
from cocofl.accounting import Accountant, Sampling, check_epsilon
from cocofl.chain import BlockChain
from cocofl.config import Experiment, typed
from cocofl.data import DataSet, Partition, Rule
from cocofl.data.partition import COUNTED, class_counts, class_densities
from cocofl.engine.rounds import Job
from cocofl.errors import InvalidExperiment
from cocofl.experiment.engines import engine_kind, machine
from cocofl.experiment.fit import (
    check_calibration,
    check_inputs,
    check_losses,
    check_outputs,
    sample_shape,
    usual_task,
)
from cocofl.experiment.tables import ExperimentTables
from cocofl.fl.codec import check_use
from cocofl.fl.devices import (
    POPULATIONS,
    Devices,
    Group,
    groups_from,
    limited_groups,
    make_devices,
)
from cocofl.fl.federation import Faults, Federation
from cocofl.fl.metrics import Populations
from cocofl.fl.privacy import Bounds, NoiseOfRound, PrivateMean, privately, seeded_noise
from cocofl.fl.strategies import STRATEGIES, Strategy, check_can_learn, facts_of, low_rank_of
from cocofl.fl.strategies.facts import SLICES
from cocofl.fl.trainer import Trainer, TrainerSpec
from cocofl.fl.training import LOSSES
from cocofl.freeze import AdaptedChain, LowRank, State, chain_state, check_state
from cocofl.hub import PREFIX, is_hugging_face
from cocofl.models.hugging_face import PRETRAINED, RANDOM, WEIGHTS
from cocofl.named import lookup, nearest
from cocofl.profiling.subject import Subject
from cocofl.runlog import check_metric_names, read_state
from cocofl.source import VERSION, source_commit

CENTRAL_SPEEDUP = 10
"""Centralized training takes this many times fewer rounds, each an epoch over all data."""


MOST_NAMES = 1000
"""Of classes, that a run's folder remembers."""


def rounds_of(experiment: Experiment) -> int:
    """How many rounds its run has: with all data in one place fewer than it says."""
    central = facts_of(experiment.strategy.name).all_data_in_one_place
    return max(1, experiment.rounds // (CENTRAL_SPEEDUP if central else 1))


def load_data(experiment: Experiment) -> DataSet:
    """The data set that the experiment names."""
    settings = experiment.data
    return data.load(
        settings.name,
        data_dir=settings.dir or None,
        preset=settings.preset,
        options=settings.options,
    )


def strategy_options(experiment: Experiment) -> tuple[dict[str, Any], LowRank | None]:
    """What the strategy of an experiment is told, and the adapters that this asks for."""
    settings, make = experiment.strategy, _strategy_made_by(experiment)
    known = {
        name: parameter.default
        for name, parameter in inspect.signature(make).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    check_can_learn(settings.options, known, settings.name)
    options = dict[str, Any]()
    for key, value in settings.options.items():
        if key not in known:
            raise InvalidExperiment(
                f"unknown key strategy.{key}{nearest(key, known)}; {settings.name} takes "
                f"{', '.join(known) or 'no options'}"
            )
        plain = isinstance(known[key], bool | int | float | str)
        options[key] = typed(type(known[key]) if plain else Any, value, f"strategy.{key}")
    return options, low_rank_of(options, known)


def devices_of(experiment: Experiment) -> Devices:
    """The devices and their groups."""
    return make_devices(experiment.devices.count, _groups_of(experiment), seed=experiment.seed)


def _groups_of(experiment: Experiment) -> Sequence[Group]:
    groups = experiment.devices.groups
    if isinstance(groups, str) and groups in POPULATIONS:
        return POPULATIONS[groups]
    if isinstance(groups, str) and groups.startswith("limited:"):
        try:
            return limited_groups(float(groups.removeprefix("limited:")))
        except ValueError as error:
            raise InvalidExperiment(f"devices.groups is {groups!r}: {error}") from error
    if isinstance(groups, list) and groups and all(isinstance(g, Mapping) for g in groups):
        return groups_from(groups)
    raise InvalidExperiment(
        f"devices.groups is {groups!r}; expected {', '.join(map(repr, POPULATIONS))}, "
        "'limited:0.25', or a list of tables with name, share, time, memory, upload or trace"
    )


def _strategy_made_by(experiment: Experiment) -> Callable[..., Strategy]:
    return lookup(experiment.strategy.name, STRATEGIES, "strategy", InvalidExperiment)


class Setup:
    """An experiment with everything that its names stand for."""

    def __init__(self, experiment: Experiment, dataset: DataSet | None = None) -> None:
        self.experiment = experiment
        self.data: DataSet = dataset or load_data(experiment)
        options, low_rank = strategy_options(experiment)
        self.subject = Subject(
            experiment.model.name,
            experiment.training.batch,
            self.data.facts.num_classes,
            tuple(self._model_options().items()),
            *((low_rank.rank, low_rank.alpha) if low_rank else ()),
        )
        experiment.training.check_optimizer()
        self.trainer = Trainer(
            TrainerSpec(
                self.subject,
                experiment.training,
                self.data.train,
                self.data.test,
                experiment.engine.kernels,
                experiment.evaluation.metrics,
                experiment.upload,
            )
        )
        check_metric_names([one.name for one in self.trainer.tally.metrics])
        check_inputs(self.trainer.chain().example, self.data, experiment.model.name)
        self.tables = ExperimentTables(
            experiment,
            self.trainer,
            lambda: self.federation.least_budgets(rounds_of(experiment)),
        )
        self.facts = facts_of(experiment.strategy.name)
        codec, strategy = self.trainer.codec, experiment.strategy.name
        facts, name = self.facts, experiment.upload.codec
        check_use(codec, name, strategy, facts.uploads, waits=facts.waits)
        self.strategy = self._strategy(options)
        if self.strategy.width != 1.0:
            self.subject = self.subject.narrowed(self.strategy.width)
            self.trainer = Trainer(replace(self.trainer.spec, subject=self.subject))
        self.spec = self.trainer.spec
        self.chain: BlockChain = self.trainer.chain()

    def _model_options(self) -> dict[str, Any]:
        """What the model's function is told: of one that is made for the data, the data too."""
        model, facts = self.experiment.model, self.data.facts
        if not is_hugging_face(model.name):
            if model.init == PRETRAINED:
                raise InvalidExperiment(
                    f"model.init is {PRETRAINED!r}, but {model.name} has no weights of its own; "
                    f"expected a safetensors file, or a model as {PREFIX}NAME"
                )
            return dict(model.options)
        told: dict[str, Any] = {
            "task": usual_task(facts),
            "shape": sample_shape(self.data),
            "init": RANDOM if model.init == RANDOM else PRETRAINED,
        }
        if facts.task == "text":
            told |= {"pad_id": facts.pad_id, "vocab_size": facts.vocab_size}
        return told | dict(model.options)

    def job(self) -> Job:
        """All that the round loop needs."""
        experiment = self.experiment
        settings, privacy = experiment.devices, experiment.privacy
        # Of a fixed number out of those who can be asked nobody knows how many they are.
        is_chance = self.federation.by_coin or not (
            self.strategy.only_able
            or any(group.trace or group.available < 1 for group in self.devices.groups)
        )
        population = settings.count if is_chance else settings.per_round
        sampling = Sampling(privacy.sampling, population, settings.per_round)
        return self.private(self.plain_job(), sampling, seeded_noise(experiment.seed))

    def private(
        self, job: Job, sampling: Sampling, noise: NoiseOfRound, *, clips: bool = True
    ) -> Job:
        """A job whose merge hides single devices, where the experiment wants that."""
        experiment, privacy = self.experiment, self.experiment.privacy
        if not privacy.is_on:
            return job
        bounds, name = Bounds.of_trainer(self.trainer, privacy), experiment.strategy.name
        if self.facts.all_data_in_one_place:
            raise InvalidExperiment(f"privacy is on, but {name!r} has one device with all data")
        if job.strategy.arrival is not None:
            raise InvalidExperiment(
                f"privacy is on, but the server of {name!r} does not wait for the devices of a "
                "round, and what chance hides is counted in rounds; take another strategy"
            )
        measures = self.facts.uploads == SLICES or not self.strategy.tracks_statistics
        if measures and len(bounds.shapes) > len(bounds.learned):
            raise InvalidExperiment(
                f"privacy is on, but no noise covers what devices of {name!r} measure of norms; "
                "take a network without BatchNorm, or another strategy"
            )
        if job.rules is not None:
            raise InvalidExperiment(
                f"privacy is on, but merge.rules is {list(experiment.merge.rules)} and merge.share "
                f"{experiment.merge.share:g}: how far one device moves what others vote for has no "
                "bound that noise could hide; say rules = [] and share = 1 in [merge]"
            )
        accountant = Accountant(privacy.noise, privacy.delta, sampling)
        check_epsilon(accountant, privacy.max_epsilon, job.rounds)
        mean = PrivateMean(bounds, sampling.per_round, noise, clips)
        merge = privately(job.strategy.merge, mean)
        strategy = replace(job.strategy, merge=merge)
        return replace(job, strategy=strategy, accountant=accountant, sees_devices=False)

    def plain_job(self) -> Job:
        """The same without privacy."""
        experiment = self.experiment
        self.check_labels()
        training, central = experiment.training, self.facts.all_data_in_one_place
        slower = CENTRAL_SPEEDUP if central else 1
        federation = self._central() if central else self.federation
        rules = experiment.merge.made()
        merge = self.strategy.merge
        if rules is not None:
            merge = merge.with_rules(rules)
        strategy = replace(self.strategy, merge=experiment.server.on_top_of(merge))
        return Job(
            strategy=strategy,
            rules=rules,
            federation=federation,
            trainer=self.trainer,
            initial=self.trainer.server_state(self._initial_state()),
            rounds=rounds_of(experiment),
            seed=experiment.seed,
            training=replace(
                training,
                decay_rounds=tuple(max(1, decay // slower) for decay in training.decay_rounds),
            ),
            faults=Faults() if central else experiment.faults,
            evaluation=experiment.evaluation.with_fewer_rounds(slower),
            populations=self._populations(),
            deadline_s=federation.deadline_s,
            checkpoint_every=experiment.engine.checkpoint_every,
        )

    def check_labels(self) -> None:
        """Complain where what the network returns, loss, metrics and labels do not fit."""
        loss, model = self.experiment.training.loss, self.experiment.model.name
        check_losses(loss, self.trainer.tally.metrics, self.data)
        check_calibration(self.experiment.training, self.data)
        if loss in LOSSES:
            check_outputs(self.trainer, self.data, model)

    @cached_property
    def devices(self) -> Devices:
        """The devices and their groups."""
        return devices_of(self.experiment)

    @cached_property
    def partition(self) -> Partition:
        """Who holds which samples."""
        settings = self.experiment.data
        rule = Rule(settings.split, settings.alpha, settings.equal)
        count, seed = self.experiment.devices.count, self.experiment.seed
        return data.divide(self.data.train, count, seed, rule, self.devices.group_of)

    @cached_property
    def federation(self) -> Federation:
        """The devices with their data."""
        recipe, per_round = self.experiment.training, self.experiment.devices.per_round
        privacy, seed = self.experiment.privacy, self.experiment.seed
        by_coin = privacy.is_on and privacy.sampling == "poisson"
        return Federation(
            self.devices, self.partition, recipe, per_round, seed, by_coin, self._step_s
        )

    @property
    def _step_s(self) -> float:
        table, batch = self.tables.spans(), self.experiment.training.batch
        return (table.full_step_s or 1.0) * batch / (table.batch or batch)

    def about(self) -> dict[str, Any]:
        """What a result must say about where it comes from."""
        privacy = self.experiment.privacy
        return {
            "command": _command(),
            "cocofl": VERSION,
            "commit": source_commit(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "hardware": machine(self.experiment),
            "engine": engine_kind(self.experiment),
            "strategy": self.experiment.strategy.name,
            "strategy_facts": asdict(self.facts),
            "metrics": {one.name: asdict(one.facts) for one in self.trainer.tally.metrics},
            "class_names": list(self.data.facts.class_names[:MOST_NAMES]),
            "tables": dict(self.tables.served),
            "model_blocks": len(self.chain),
            "samples_left_over": len(self.partition.remainder),
            **({"width": self.strategy.width} if self.strategy.width != 1.0 else {}),
            **({"privacy": asdict(privacy)} if privacy.is_on else {}),
        }

    def _strategy(self, options: Mapping[str, Any]) -> Strategy:
        name = self.experiment.strategy.name
        made = _strategy_made_by(self.experiment)(self.tables, **options)
        if made.arrival is not None and self.facts.waits:
            raise InvalidExperiment(
                f"the server of {name} does not wait for devices, as its `arrival` says; "
                "declare StrategyFacts(waits=False), so that no deployment waits for them"
            )
        if made.arrival is not None and not made.tracks_statistics:
            raise InvalidExperiment(
                f"the server of {name} does not wait for devices, so it cannot ask those "
                "of a round for norm statistics: let them send these (tracks_statistics)"
            )
        return made

    def _central(self) -> Federation:
        """One device with all the data."""
        everything = np.arange(len(self.data.train))
        whole = Partition(everything, np.array([0, len(everything)]), everything[:0])
        devices = make_devices(1, [Group("all")], self.experiment.seed)
        recipe, seed = self.experiment.training, self.experiment.seed
        return Federation(devices, whole, recipe, 1, seed, step_s=self._step_s)

    def _populations(self) -> Populations | None:
        if self.data.facts.labels not in COUNTED:
            return None
        labels, classes = self.data.train.labels, self.data.facts.num_classes
        by_group, by_device = (
            class_densities(class_counts(self.partition, labels, classes, groups))
            for groups in (self.devices.group_of, None)
        )
        names = tuple(group.name for group in self.devices.groups)
        return Populations(names, by_group, by_device)

    def _initial_state(self) -> State:
        tensors, begin = self._initial_weights(), self.strategy.begin
        return tensors if begin is None else begin(self.trainer, tensors)

    def _initial_weights(self) -> State:
        init, chain, seed = self.experiment.model.init, self.chain, self.experiment.seed
        adapters = chain.fresh_adapters(seed) if isinstance(chain, AdaptedChain) else State()
        if init and init not in WEIGHTS:
            if not os.path.exists(init):
                raise InvalidExperiment(
                    f"model.init is {init!r}{nearest(init, WEIGHTS)}, and there is no such file; "
                    "expected a safetensors file, nothing for fresh weights, or, where model.name "
                    f"is {PREFIX}NAME, {' or '.join(WEIGHTS)}"
                )
            _, state = read_state(Path(init))
            state |= {key: t for key, t in adapters.items() if key not in state}
            check_state(self.chain, state, None)
            return {key: t for key, t in state.items() if not key.endswith("num_batches_tracked")}
        model, _ = self.subject.build(seed=self.experiment.seed)
        fresh = model.state_dict() | adapters
        return {key: fresh[key].clone() for key in chain_state(self.chain)}


def _command() -> str:
    """The command line, if it is our own.

    Of any other program only the name is kept: its words are not ours to know, and one of them may
    be a secret, as a ServerApp's token is.
    """
    program, ours = Path(sys.argv[0]), __name__.partition(".")[0]
    return shlex.join([ours, *sys.argv[1:]]) if program.stem == ours else program.name
