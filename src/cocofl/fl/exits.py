"""Training the first blocks of a network with a classifier after each stage.

A stage ends at a block. What exits are is said in :mod:`cocofl.fl.exit_scores`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.errors import InvalidModel
from cocofl.fl.exit_scores import DIMENSIONS, ExitScores, exit_key, pooled
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.trainer import Task, Trainer
from cocofl.freeze import FrozenNet, first_blocks
from cocofl.freeze.work import run_example
from cocofl.rng import stream
from cocofl.span import Blocks, Span


@dataclass(frozen=True)
class DepthWork:
    """Train all blocks up to the last of the ``stages``, with an exit after each.

    Every exit has a loss of its own, and learns from each other one what it says of the classes:
    ``distillation`` weighs that.
    """

    stages: tuple[int, ...]
    distillation: float = 1.0

    @property
    def blocks(self) -> Blocks:
        """What it trains."""
        return Span(0, self.stages[-1])

    def __str__(self) -> str:
        return str(self.blocks)

    def train(self, trainer: Trainer, task: Task, state: ServerState) -> Contribution:
        """One device's local training; it sends its blocks and its exits."""
        chain = trainer.chain()
        net = first_blocks(chain, self.stages[-1], state.tensors)
        net.train()
        depths = [depth for depth in self.stages if depth < len(chain)]
        exits = {
            key: nn.Parameter(value.clone())
            for depth in depths
            for key, value in exit_of(trainer, depth, task.seed, state.tensors).items()
        }
        named = [*(p for p in net.parameters() if p.requires_grad), *exits.values()]
        losses = self._losses(net, exits, trainer, task)
        loss = trainer.training.descend(named, losses, task.lr)
        sent = net.update().tensors | {key: value.detach() for key, value in exits.items()}
        return Contribution(sent, len(task.indices), loss)

    def _losses(
        self, net: FrozenNet, exits: Mapping[str, Tensor], trainer: Trainer, task: Task
    ) -> Iterator[Tensor]:
        scores_of = ExitScores(net, trainer.chain(), self.stages)
        for inputs, labels in trainer.load(task):
            scores = scores_of(inputs, exits)
            losses = torch.stack([trainer.loss(one, labels) for one in scores])
            yield losses.sum() + self.distillation * mutual_distance(scores)


def mutual_distance(scores: Sequence[Tensor]) -> Tensor:
    """How far each exit is from what each other one says, as a mean over these; 0 of a single one.

    >>> says = [torch.tensor([[0.0, 0.0]]), torch.tensor([[2.0, 0.0]])]
    >>> round(float(mutual_distance(says)), 4)
    0.7616
    """
    logs = [F.log_softmax(one, -1) for one in scores]
    found = [
        F.kl_div(student, teacher.detach(), reduction="batchmean", log_target=True)
        for i, student in enumerate(logs)
        for j, teacher in enumerate(logs)
        if i != j
    ]
    return torch.stack(found).sum() / (len(scores) - 1) if found else scores[0].new_zeros(())


def exit_of(trainer: Trainer, depth: int, seed: int, state: Mapping[str, Tensor]) -> Tensors:
    """The classifier after so many blocks: the server's, or the one that all begin with."""
    key = exit_key(depth)
    names = (f"{key}.weight", f"{key}.bias")
    like = next(trainer.model().parameters())
    if all(name in state for name in names):
        return {name: state[name].to(like.dtype) for name in names}
    features, classes = exit_features(trainer, depth), trainer.spec.train.facts.num_classes
    rng = stream(seed, "exits", depth)
    bound = features**-0.5
    shapes = ((classes, features), (classes,))
    return {
        name: torch.from_numpy(rng.uniform(-bound, bound, shape)).to(like.dtype)
        for name, shape in zip(names, shapes, strict=True)
    }


def exit_features(trainer: Trainer, depth: int) -> int:
    """How many features an exit after so many blocks has."""
    chain = trainer.chain()
    main = chain.wiring[depth - 1].outputs[0]
    value = run_example(chain, lambda block, arguments: block(*arguments), depth)[main]
    if not isinstance(value, Tensor) or value.ndim not in DIMENSIONS:
        raise InvalidModel(
            f"block {depth - 1} of {trainer.spec.subject.model} hands on no tensor of two to four "
            "axes, so no classifier can stand behind it"
        )
    return int(pooled(value).shape[-1])
