"""Training a span of blocks: what CoCoFL's devices do, and, with all blocks, FedAvg's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from cocofl.fl.local import Task, Workshop
from cocofl.fl.merge import Contribution, State
from cocofl.freeze import FrozenNet, freeze
from cocofl.span import Blocks


@dataclass(frozen=True)
class SpanWork:
    """Train the blocks of ``span``; freeze the others as ``variant`` says."""

    span: Blocks
    variant: str = "qff"

    def __str__(self) -> str:
        return str(self.span)

    def train(self, workshop: Workshop, task: Task, state: State) -> Contribution:
        """One device's local training; it sends the trained blocks only."""
        net = freeze(
            workshop.chain(),
            self.span,
            variant=self.variant,
            backend=workshop.materials.backend,
            state=state,
            plan=workshop.plan,
            state_is_checked=workshop.has_checked(state),
        )
        net.train()
        trained = [p for p in net.parameters() if p.requires_grad]
        loss = workshop.recipe.descend(trained, self._losses(net, workshop, task), task.lr)
        return Contribution(net.update().tensors, len(task.indices), loss)

    def _losses(self, net: FrozenNet, workshop: Workshop, task: Task) -> Iterator[Tensor]:
        last = len(workshop.batches(task)) - 1
        for i, (inputs, labels) in enumerate(workshop.load(task)):
            if i == last and self.variant == "qff":
                net.measure_scales()  # for those who will have these blocks frozen
            yield workshop.loss(net(inputs), labels)
