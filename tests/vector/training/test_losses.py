"""Losses of many devices, against those of one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cocofl.fl.training import LOSSES, STACKED_LOSSES
from cocofl.vector.training.losses import distance

VALID = torch.tensor([4, 3, 0, 4])
TAUGHT = torch.tensor([True, True, True, False])


@pytest.mark.parametrize("positions", [(), (5,)])
def test_distance_is_the_divergence_of_valid_samples(positions: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 4, 4, *positions, 3).double()
    found = distance(student, teacher, VALID, TAUGHT)
    for d, n in enumerate([4, 3]):
        expected = F.kl_div(
            student[d, :n].log_softmax(-1),
            teacher[d, :n].softmax(-1),
            reduction="batchmean",
        )
        assert found[d].item() == pytest.approx(expected.item(), abs=1e-12)
    assert found[2:].tolist() == [0.0, 0.0]


def test_impossible_classes_of_others_spoil_nothing() -> None:
    """Scores may be minus infinity where a network excludes classes."""
    student = torch.zeros(4, 4, 3)
    student[3, :, 0] = -torch.inf
    student.requires_grad_()
    distance(student, torch.ones(4, 4, 3), VALID, TAUGHT).sum().backward()
    assert student.grad is not None
    assert bool(torch.isfinite(student.grad).all())


@pytest.mark.parametrize("kind", ["squared_error", "binary_cross_entropy"])
def test_the_loss_of_each_device_is_that_of_its_valid_samples(kind: str) -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(3, 4, 2), torch.randint(2, (3, 4, 2), dtype=torch.uint8)
    labels = labels.float() if kind == "squared_error" else labels
    found = STACKED_LOSSES[kind](outputs, labels, torch.tensor([4, 2, 1]), None)
    alone = [LOSSES[kind](outputs[d, :n], labels[d, :n]) for d, n in enumerate((4, 2, 1))]
    assert torch.allclose(found, torch.stack(alone))
