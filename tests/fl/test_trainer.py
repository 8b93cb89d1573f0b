"""Local training against the same thing written down plainly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl import Span, data
from cocofl.engine.executor import added
from cocofl.errors import InvalidSetting
from cocofl.fl.batches import mini_batches, n_batches, tensors
from cocofl.fl.merge import Mean
from cocofl.fl.spans import SpanWork
from cocofl.fl.strategies.distreal import DroppingWork
from cocofl.fl.strategies.helios import SoftWork
from cocofl.fl.trainer import Trainer, TrainerSpec, Work
from cocofl.fl.training import Training
from cocofl.fl.widths import OrderedWork, StatisticsWork, WidthWork
from cocofl.freeze.layout import channels_first
from cocofl.models.base import narrowed
from cocofl.profiling.subject import Subject

from .conftest import initial, make_workshop, task


def plain_training(trainer: Trainer, model: nn.Module, one, **settings: float) -> None:
    """The task's mini-batches in an ordinary loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=one.lr, **settings)
    rng = one.rng("batches")
    for indices in mini_batches(one.indices, 16, "keep", 1, rng):
        inputs, labels = tensors(trainer.spec.train, indices)
        optimizer.zero_grad()
        # Channels first: see freeze/layout.py for what oneDNN does to narrow networks otherwise.
        F.cross_entropy(model(channels_first(inputs)), labels).backward()
        optimizer.step()


def test_training_every_block_is_ordinary_training(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, weight_decay=0.01, momentum=0.9)
    one = task(SpanWork(Span(0, 6), "f"))
    sent = trainer.train(one, initial(trainer))
    model, _ = trainer.spec.subject.build()
    plain_training(trainer, model, one, weight_decay=0.01, momentum=0.9)
    expected = model.state_dict()
    assert sent.samples == 40
    for key, tensor in sent.tensors.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-6, msg=key)


def test_a_span_sends_its_blocks_and_their_scales_only(trainer: Trainer) -> None:
    sent = trainer.train(task(SpanWork(Span(2, 4))), initial(trainer))
    keys = {key for key in sent.tensors if not key.startswith("scales.")}
    chain = trainer.chain()
    own = {key for index in (2, 3) for key in chain.block_keys(index)}
    assert keys == {key for key in own if not key.endswith("num_batches_tracked")}
    blocks = {key.split(".")[1] for key in sent.tensors if key.startswith("scales.")}
    assert blocks == {"2", "3"}


def test_the_same_task_gives_the_same_bits_whatever_was_trained_before(
    trainer: Trainer,
) -> None:
    state, one = initial(trainer), task(SpanWork(Span(1, 5)))
    first = trainer.train(one, state).tensors
    trainer.train(task(SpanWork(Span(0, 2)), device=4), state)
    again = trainer.train(one, state).tensors
    assert all(torch.equal(first[key], again[key]) for key in first)


def test_clipping_bounds_the_gradient(digits: data.DataSet) -> None:
    trainer = make_workshop(digits, clip=1e-6)
    state = initial(trainer)
    sent = trainer.train(task(SpanWork(Span(0, 6), "f"), lr=1.0), state)
    moved = max(
        float((t - state.tensors[key]).abs().max())
        for key, t in sent.tensors.items()
        if key.endswith("weight")
    )
    assert 0 < moved < 1e-5


def test_heterofl_trains_the_narrow_network_on_its_slice(trainer: Trainer) -> None:
    state, one = initial(trainer), task(WidthWork(0.5))
    sent = trainer.train(one, state)
    model, _ = trainer.spec.subject.build(0.5)
    tensors_ = state.tensors
    model.load_state_dict(
        {key: tensors_[key][at] for key, at in trainer.places(0.5).items() if key in tensors_},
        strict=False,
    )
    plain_training(trainer, model, one)
    learned = dict(model.named_parameters())
    assert sent.tensors.keys() == learned.keys()  # statistics are not tracked
    for key, tensor in sent.tensors.items():
        torch.testing.assert_close(tensor, learned[key].data, rtol=1e-4, atol=1e-6, msg=key)


def test_a_scaler_makes_no_difference_before_a_batch_norm_but_does_elsewhere(
    trainer: Trainer,
) -> None:
    """BatchNorm divides a factor out again, so what is left is the size of its epsilon."""
    state = initial(trainer)
    plain = trainer.train(task(WidthWork(0.5)), state).tensors
    scaled = trainer.train(task(WidthWork(0.5, scaler=True)), state).tensors
    differs = max(float((plain[key] - scaled[key]).abs().max()) for key in plain)
    assert 0 < differs < 0.1


def test_a_masked_loss_leaves_absent_classes_alone(trainer: Trainer) -> None:
    labels = trainer.spec.train.labels
    few = np.flatnonzero(np.isin(labels, [2, 7]))[:32]
    one = task(WidthWork(1.0, masked=True))
    one = type(one)(one.seed, one.round_index, one.device, few, one.work, one.lr)
    state = initial(trainer)
    sent = trainer.train(one, state)
    (bias,) = [key for key in sent.rows if key.endswith("bias")]
    assert sent.rows[bias].tolist() == [2, 7]
    absent = [c for c in range(10) if c not in (2, 7)]
    assert torch.equal(sent.tensors[bias][absent], state.tensors[bias][absent])
    assert not torch.equal(sent.tensors[bias][[2, 7]], state.tensors[bias][[2, 7]])


def test_fjord_with_one_width_is_the_narrow_network(trainer: Trainer) -> None:
    state = initial(trainer)
    one = task(OrderedWork((0.5,)))
    sent = trainer.train(one, state)
    model, _ = trainer.spec.subject.build(0.5)
    tensors_ = state.tensors
    model.load_state_dict(
        {key: tensors_[key][at] for key, at in trainer.places(0.5).items() if key in tensors_},
        strict=False,
    )
    plain_training(trainer, model, one)
    expected = model.state_dict()
    assert sent.width == 0.5
    for key, tensor in sent.tensors.items():
        own = key.removeprefix("widths.0.5.")
        torch.testing.assert_close(tensor, expected[own], rtol=1e-4, atol=1e-6, msg=key)
    assert "widths.0.5.stem.1.running_mean" in sent.tensors


def test_fjord_never_touches_channels_beyond_the_drawn_widths(trainer: Trainer) -> None:
    state = initial(trainer)
    sent = trainer.train(task(OrderedWork((0.5, 1.0)), samples=16), state)
    (drawn,) = [key for key in sent.tensors if key.endswith("stem.1.running_mean")]
    weight, old = sent.tensors["stem.0.weight"], state.tensors["stem.0.weight"]
    inside = trainer.places(0.5)["stem.0.weight"]
    assert not torch.equal(weight[inside], old[inside])
    if drawn.startswith("widths.0.5."):  # one mini-batch: one width
        assert torch.equal(weight[4:], old[4:])
    else:
        assert not torch.equal(weight[4:], old[4:])


def test_distillation_trains_the_widest_network_too(trainer: Trainer) -> None:
    state = initial(trainer)
    works = (OrderedWork((0.25, 1.0)), OrderedWork((0.25, 1.0), distillation=0.5))
    plain, taught = (trainer.train(task(w), state).tensors for w in works)
    assert any(not torch.equal(plain[key], taught[key]) for key in plain if key in taught)
    assert "stem.1.running_mean" in taught  # statistics of width 1 exist in any case


def test_statistics_are_means_over_a_devices_mini_batches(trainer: Trainer) -> None:
    state, one = initial(trainer), task(StatisticsWork())
    sent = trainer.train(one, state).tensors
    assert all("running" in key for key in sent)
    rng = one.rng("batches")
    convolve = nn.functional.conv2d
    means = [
        convolve(
            tensors(trainer.spec.train, indices)[0], state.tensors["stem.0.weight"], padding=1
        ).mean((0, 2, 3))
        for indices in mini_batches(one.indices, 16, "keep", 1, rng)
    ]
    expected = torch.stack(means).mean(0)
    torch.testing.assert_close(sent["stem.1.running_mean"], expected, rtol=1e-4, atol=1e-5)


def test_sums_do_not_depend_on_how_the_test_data_is_cut(trainer: Trainer) -> None:
    state = initial(trainer)
    (whole,) = added(trainer.test(state, [np.arange(100)], "running"))
    parts = [np.arange(a, b) for a, b in pairwise(range(0, 101, 20))]
    (cut,) = added(trainer.test(state, parts, "running"))
    assert np.array_equal(whole, cut)
    assert whole.sum() == 100
    (of_batches,) = added(trainer.test(state, parts, "batch"))
    assert not np.array_equal(whole, of_batches)


def test_batches_cover_every_sample_once_an_epoch() -> None:
    found = mini_batches(np.arange(70), 32, "keep", 2, np.random.default_rng(0))
    assert [len(batch) for batch in found] == [32, 32, 6] * 2
    assert sorted(np.concatenate(found[:3]).tolist()) == list(range(70))
    assert found[0].tolist() != found[3].tolist()
    dropped = mini_batches(np.arange(70), 32, "drop", 1, np.random.default_rng(0))
    assert [len(batch) for batch in dropped] == [32, 32]
    (only,) = mini_batches(np.arange(5), 32, "drop", 1, np.random.default_rng(0))
    assert len(only) == 5


@pytest.mark.parametrize(
    ("samples", "last", "expected"),
    [(32, "keep", 1), (33, "keep", 2), (33, "drop", 1), (0, "keep", 0)],
)
def test_number_of_batches(samples: int, last: str, expected: int) -> None:
    assert n_batches(samples, 32, last) == expected


def test_an_unknown_loss_is_named(digits: data.DataSet) -> None:
    with pytest.raises(InvalidSetting, match="did you mean cross_entropy"):
        make_workshop(digits, loss="crossentropy")


def test_a_last_batch_of_one_sample_says_what_to_do(
    digits: data.DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_workshop(digits)

    def train(*_: object) -> None:
        # What PyTorch's BatchNorm says of one value per channel.
        nn.BatchNorm1d(2)(torch.ones(1, 2))

    monkeypatch.setattr(SpanWork, "train", train)
    with pytest.raises(InvalidSetting, match=r"device \d+ has .* one sample.*last_batch = .drop"):
        trainer.train(task(SpanWork(Span(0, 6))), initial(trainer))


class Odd(nn.Module):
    """Two layers with one weight, and a buffer of whole numbers."""

    def __init__(self, num_classes: int, width: float) -> None:
        super().__init__()
        channels = narrowed(8, width)
        self.stem, self.norm = nn.Linear(64, channels), nn.BatchNorm1d(channels)
        self.one, self.two = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.two.weight = self.one.weight
        self.last = nn.Linear(channels, num_classes)
        self.register_buffer("order", torch.arange(63, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x.flatten(1)[:, self.order]))
        return self.last(F.relu(self.two(F.relu(self.one(x)))))


def odd(num_classes: int, width: float = 1.0) -> tuple[nn.Module, Tensor]:
    return Odd(num_classes, width), torch.rand(4, 1, 8, 8)


@pytest.mark.parametrize(
    "work",
    [WidthWork(0.5), OrderedWork((0.5, 1.0)), DroppingWork(0.5), SoftWork(0.5, top=0.5)],
    ids=lambda work: type(work).__name__,
)
def test_narrower_networks_keep_weights_tied_and_whole_numbers_whole(
    work: Work, digits: data.DataSet
) -> None:
    subject = Subject(f"{__name__}:odd", 16, 10)
    trainer = Trainer(TrainerSpec(subject, Training(batch=16), digits.train, digits.test))
    state = before = initial(trainer)
    for _ in range(2):
        state = Mean("senders")(state, [trainer.train(task(work), state)])
    after = state.tensors
    assert not torch.equal(after["one.weight"], before.tensors["one.weight"])
    # Where a cut lies between the two layers, the first one's block has the weight for both.
    assert torch.equal(after["one.weight"], after.get("two.weight", after["one.weight"]))
    assert {key for key in after if not key.startswith("widths.")} == before.tensors.keys()
    assert [key for key in after if key.endswith("order")] == ["order"]
    assert torch.equal(after["order"], before.tensors["order"])
