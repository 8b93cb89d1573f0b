"""What an operator is told of each device."""

from __future__ import annotations

import pytest
import torch

from cocofl.engine.inspection import Inspection
from cocofl.fl.state import Contribution, KeyLayout, ServerState
from cocofl.runlog import DeviceFigures

SCALE = "scales.0.relu.output"
LAYOUT = KeyLayout(learned=frozenset({"a", "b"}), block_of={"a": 0, "a.running_var": 0, "b": 1})
STATE = ServerState(
    {"a": torch.ones(4), "a.running_var": torch.ones(2), "b": torch.full((4,), 3.0)}
    | {SCALE: torch.tensor(0.1)},
    LAYOUT,
)


def sent(device: int, loss: float = 1.0, **changes: float) -> Contribution:
    tensors = {
        key: STATE.parts[key] + change for key, change in changes.items() if key in STATE.parts
    }
    if "scale" in changes:
        tensors[SCALE] = torch.tensor(changes["scale"])
    if "variance" in changes:
        tensors["a.running_var"] = torch.full((2,), changes["variance"])
    return Contribution(tensors, 10 + device, loss, device=device)


def figures(*contributions: Contribution) -> list[DeviceFigures]:
    inspection = Inspection(STATE)
    for contribution in contributions:
        inspection.add(contribution)
    return inspection.figures()


def test_norms_are_compared_block_by_block() -> None:
    # The last one trains a single block, and moves it far more than the others do.
    honest = [sent(i, a=0.1, b=0.6) for i in range(3)]
    found = figures(*honest, sent(3, a=1.0))
    assert [one.outlier for one in found] == [False, False, False, True]
    assert found[3] == DeviceFigures(3, 13, 1.0, 2.0, pytest.approx(10, rel=1e-5), 1.0, True)
    assert found[0].norm == pytest.approx((4 * 0.01 + 4 * 0.36) ** 0.5, rel=1e-5)
    assert found[0].against_median == pytest.approx(1, rel=1e-5)


def test_where_too_few_train_a_block_what_is_usual_comes_from_the_others() -> None:
    # Devices move what they train by a tenth; who alone trains the second block, by all of it.
    found = figures(sent(0, a=0.1), sent(1, a=0.1), sent(2, a=0.1), sent(3, b=3.0))
    assert [one.outlier for one in found] == [False, False, False, True]
    assert found[3].against_median == pytest.approx(10, rel=1e-5)
    found = figures(sent(0, a=0.1), sent(1, a=0.1), sent(2, a=0.1), sent(3, b=0.3))
    assert not any(one.outlier for one in found)


@pytest.mark.parametrize(
    "hostile",
    [{"loss": 9.0, "a": 0.1}, {"a": 0.1, "scale": 3e38}, {"a": 0.1, "scale": 1e-9}],
)
def test_losses_and_scales_count(hostile: dict[str, float]) -> None:
    honest = [sent(i, a=0.1, scale=0.1 + 0.01 * i) for i in range(3)]
    assert [one.outlier for one in figures(*honest, sent(3, **hostile))] == [False] * 3 + [True]


def test_norm_statistics_are_compared_apart_from_parameters() -> None:
    honest = [sent(i, a=5.0, variance=0.99) for i in range(3)]
    assert figures(*honest, sent(3, a=5.0, variance=0.0))[3].outlier


def test_honest_devices_that_differ_are_no_outliers() -> None:
    found = figures(*(sent(i, loss=1 + i / 2, a=0.1 * (1 + i / 2)) for i in range(5)))
    assert not any(one.outlier for one in found)
    assert not any(one.outlier for one in figures(sent(0, a=0.1), sent(1, a=0.2)))
    assert figures() == []
    assert figures(sent(0, a=0.0))[0].against_median == 0
