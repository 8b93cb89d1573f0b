"""Every network that ``freeze`` is tested with, stacked. Not all agree yet, so not collected.

pytest tests/vector/sweep_networks.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from cocofl import Span, chain_state, freeze, split
from cocofl.vector import Cohort, DeviceWork, Sgd
from cocofl.vector.losses import one_by_one
from tests.freeze.networks import NETWORKS


def energy(outputs: Any, _labels: Tensor) -> Tensor:
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return torch.stack([x.square().mean() for x in leaves if x.is_floating_point()]).sum()


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


@pytest.mark.parametrize("variant", ["f", "qff"])
@pytest.mark.parametrize("name", NETWORKS)
def test_two_steps_of_every_network(name: str, variant: str) -> None:
    network = NETWORKS[name]
    torch.manual_seed(0)
    chain = split(without_dropout(network.build()), network.inputs)
    n, batch = len(chain), len(network.inputs[0])
    works = [DeviceWork(span, variant, 0.05) for span in (Span(0, n), Span(0, 1), Span(n - 1, n))]
    labels = torch.zeros(batch, dtype=torch.long)
    cohort = Cohort(
        chain,
        lambda i: (tuple(x[i] for x in network.inputs), labels[i]),
        devices=3,
        batch=batch,
        optimizer=Sgd(),
        loss=one_by_one(energy),
        precision="fp32",
    )
    indices = np.broadcast_to(np.arange(batch), (2, 3, batch)).copy()
    state = chain_state(chain)
    rows = cohort.rows_of([state])
    cohort.train(rows, [frozenset()], works, indices, np.full((2, 3), batch))
    for d, work in enumerate(works):
        net = freeze(chain, work.span, variant=variant, backend="reference", state=state).train()
        sgd = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=work.lr)
        for step in range(2):
            if step == 1 and variant == "qff":
                net.measure_scales()
            sgd.zero_grad()
            energy(net(*[x.clone() for x in network.inputs]), labels).backward()
            sgd.step()
        expected, found = net.update().tensors, cohort.update(d, work)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            if not key.startswith("scales."):
                assert (found[key] - tensor).abs().max() <= 1e-2 * tensor.abs().max().clamp(min=0.1)
