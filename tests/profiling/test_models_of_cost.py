"""Predicting what was not measured: time fitted to a few spans, memory replayed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocofl import KernelPlan, ProfileTable, Span, all_spans, freeze, split
from cocofl.errors import InvalidModel, InvalidSetting
from cocofl.models import MODELS
from cocofl.profiling.analytic import analytic_table, block_work, peak_bytes
from cocofl.profiling.cost_model import design, fast_table, fit, interleaved
from cocofl.profiling.device_rates import DEVICES
from cocofl.profiling.memory import MemoryModel, mark, peak_tensor_bytes, recorded
from cocofl.profiling.subject import WIDTHS, Settings, measured_state
from cocofl.profiling.sweep import Progress
from cocofl.span import Blocks

OWN = """
from torch import nn

def net(width=1.0):
    c = max(1, round(8 * width))
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()),
        nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(c * 64, 4)),
    )
    import torch
    return model, torch.randn(4, 1, 8, 8)

def fixed():
    return net()

def for_batches_of_eight():
    import torch
    linear, last = nn.Linear(16, 16), nn.Linear(16, 4)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = linear, last

        def forward(self, x):
            return self.last(torch.relu(self.linear(x.reshape(8, 16))))

    return Net(), torch.randn(8, 4, 4)

def number():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return f"{name}:net"


def tiny(name: str, variant: str, batch: int = 4):
    torch.manual_seed(0)
    model = MODELS[name](4, tiny=True)
    inputs = (model.example_input(batch),)
    chain = split(model, inputs)
    state, plan = measured_state(chain, inputs), KernelPlan()

    def build(span: Span):
        return freeze(chain, span, variant=variant, backend="reference", state=state, plan=plan)

    return chain, inputs, build


def test_a_timeline_counts_what_is_alive_between_marks() -> None:
    def run() -> None:
        mark("a")
        x = torch.ones(1000)
        y = torch.ones(500)
        mark("b")
        del x
        mark("c")
        assert len(y) == 500

    timeline = recorded(run)
    a, b, c = (dict(timeline.marks)[name] for name in "abc")
    alive = timeline.alive
    assert alive[b] - alive[a] == max(alive[a : c + 1]) - alive[a] == 6000
    assert alive[c] - alive[a] == 2000


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("mobilenet", "qff"),
        pytest.param("mobilenet", "f", marks=pytest.mark.slow),
        pytest.param("densenet40", "qff", marks=pytest.mark.slow),
        pytest.param("transformer", "ff", marks=pytest.mark.slow),
    ],
)
def test_replayed_memory_is_that_of_every_span(name: str, variant: str) -> None:
    chain, inputs, build = tiny(name, variant)
    memory = MemoryModel(build, inputs, len(chain))
    spans = list(all_spans(len(chain)))
    for span in spans[:: max(1, len(spans) // 4)]:
        replayed = memory.peak_bytes(span)
        measured = peak_tensor_bytes(lambda span=span: build(span), inputs)
        assert replayed == pytest.approx(measured, rel=0.02), span


def test_replayed_memory_of_sets_with_gaps_lies_between_their_parts_and_full_training() -> None:
    chain, inputs, build = tiny("mobilenet", "f")
    memory = MemoryModel(build, inputs, len(chain))
    full = memory.peak_bytes(Span(0, len(chain)))
    assert memory.peak_bytes(Blocks("0:1+2:3")) >= memory.peak_bytes(Span(2, 3))
    assert memory.peak_bytes(Blocks("0:1+2:3")) <= 1.1 * full


@pytest.mark.parametrize("variant", [pytest.param("f", marks=pytest.mark.slow), "qff"])
def test_replayed_memory_of_spans_beside_the_classifier_errs_on_the_high_side(variant) -> None:
    chain, inputs, build = tiny("mobilenet", variant)
    n = len(chain)
    memory = MemoryModel(build, inputs, n)
    for blocks in (Span(0, 1) | Span(n - 1, n), Span(1, 3) | Span(n - 1, n)):
        measured = peak_tensor_bytes(lambda blocks=blocks: build(blocks), inputs)
        assert 0.98 * measured <= memory.peak_bytes(blocks) <= 1.25 * measured


def measured_by(model, spans) -> dict[Span, float]:
    return {span: model.step_s(span) for span in spans}


def test_the_time_model_finds_additive_costs_from_few_spans() -> None:
    chain, inputs, _ = tiny("mobilenet", "f")
    work = block_work(chain, inputs)
    n = len(chain)
    rng = np.random.default_rng(0)
    # A world of its own: each block and role costs what it likes, a factor from the analytic.
    fitted, _ = design(range(n), list(all_spans(n)))
    guess = fit(work, "qff", dict.fromkeys(fitted, 0.01))
    frozen, trained, passing, gradient = (
        scale * rng.uniform(0.5, 1.5, n) for scale in (0.001, 0.01, 0.002, 0.002)
    )
    costs = np.concatenate([[0.001], frozen, trained, passing, gradient, [0.0, 0.0]])
    world = replace(guess, costs=costs)
    model = fit(work, "qff", measured_by(world, fitted))
    spans = list(all_spans(n))
    errors = [abs(model.step_s(span) / world.step_s(span) - 1) for span in spans]
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.1
    ends = Span(0, 1) | Span(n - 1, n)
    assert 0 < model.step_s(ends) < world.step_s(Span(0, n)) * 1.1


def test_the_design_is_linear_in_the_number_of_blocks() -> None:
    for n in (1, 2, 8, 20, 40):
        fitted, checks = design(range(n), list(all_spans(n)))
        assert len(fitted) + len(checks) <= 2 * n + 16
        assert not set(fitted) & set(checks)
        assert Span(0, n) in fitted


def test_interleaved_steps_are_all_timed_and_report_progress() -> None:
    calls: dict[Span, int] = {}

    def make(span):
        def step() -> None:
            calls[span] = calls.get(span, 0) + 1

        return step

    spans = list(all_spans(8))
    progress: list[Progress] = []

    def timing() -> Iterator[Progress]:
        seconds.update((yield from interleaved(spans, make, [Span(0, 8)])))

    seconds: dict[Any, float] = {}
    progress += timing()
    assert set(seconds) == set(calls) == set(spans)
    assert progress[-1].done == progress[-1].total


def test_a_fast_table_of_ones_own_model(own: str) -> None:
    settings = Settings(own, backend="reference", batch=4, threads=1)
    *_, table = fast_table(settings)
    assert isinstance(table, ProfileTable)
    assert table.spans == tuple(all_spans(3))
    assert table.source == "fast"
    assert table.memory_kind == "tensor"
    assert table.process_bytes is not None
    assert table.process_bytes > table.full_memory_bytes
    assert table.error["measured_configurations"] >= 5
    assert table.row(Span(0, 3)) == (1.0, 1.0, 1.0)
    assert table.upload[0] < table.upload[1] < 1


@pytest.mark.slow
def test_a_fast_width_table(own: str) -> None:
    *_, table = fast_table(Settings(own, method="width", batch=4, threads=1))
    assert isinstance(table, ProfileTable)
    assert table.widths == WIDTHS
    assert (np.diff(table.upload) >= 0).all()
    assert table.upload[0] < 0.3
    assert table.error["measured_configurations"] == 23  # every third, and all levels
    assert table.source == "fast"


@pytest.mark.slow
def test_a_table_of_every_width(own: str) -> None:
    settings = Settings(own, method="width", batch=4, threads=1)
    *_, table = fast_table(settings, every_width=True)
    assert isinstance(table, ProfileTable)
    assert table.source == "measured"
    assert table.memory_kind == "tensor"
    assert dict(table.error) == {"measured_configurations": len(WIDTHS)}


@pytest.mark.parametrize("variant", ["f", "ff", "qff"])
@pytest.mark.parametrize("name", MODELS)
def test_an_analytic_table_of_every_network(name: str, variant: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name](4, tiny=True)
    inputs = (model.example_input(2),)
    chain = split(model, inputs)
    work = block_work(chain, inputs)
    n = len(chain)
    assert all(block.macs >= 0 and block.written_bytes > 0 for block in work)
    last = peak_bytes(work, Span(n - 1, n), variant, 0)
    assert 0 < last < peak_bytes(work, Span(0, n), variant, 0)


def test_counting_holds_nothing_that_backward_would_need() -> None:
    chain, inputs, _ = tiny("mobilenet", "f", batch=32)
    saved = sum(block.saved_bytes for block in block_work(chain, inputs))
    timeline = recorded(lambda: block_work(chain, inputs))
    assert max(timeline.alive) < saved / 3
    assert timeline.alive[-1] < saved / 100


def test_two_samples_are_enough_to_split_what_is_counted_with_more(own: str) -> None:
    few, many = (Settings(own, batch=32).chain(samples=n) for n in (2, None))
    assert block_work(*few) == block_work(*many)


def test_analytic_memory_of_full_training_is_near_the_measured_one() -> None:
    chain, inputs, build = tiny("mobilenet", "f", batch=32)
    work = block_work(chain, inputs)
    n = len(chain)
    counted = peak_bytes(work, Span(0, n), "f", sum(x.nbytes for x in inputs))
    assert counted == pytest.approx(peak_tensor_bytes(lambda: build(Span(0, n)), inputs), rel=0.25)


def test_an_analytic_table_is_complete_and_marked(own: str, tmp_path: Path) -> None:
    table = analytic_table(Settings(own, batch=4))
    table.save(tmp_path / "table.json")
    found = ProfileTable.load(tmp_path / "table.json", n_blocks=3)
    assert found.source == "analytic"
    assert found.spans == tuple(all_spans(3))
    widths = analytic_table(Settings(own, method="width", batch=4))
    assert widths.widths == WIDTHS
    # Widths are coupled: whatever costs less time uploads less.
    assert (np.diff(widths.time) >= 0).all()


def test_a_set_of_blocks_with_a_gap_has_a_cost() -> None:
    chain, inputs, build = tiny("mobilenet", "f")
    n = len(chain)
    work = block_work(chain, inputs)
    time = fit(work, "f", dict.fromkeys(design(range(n), [])[0], 0.01))
    memory = MemoryModel(build, inputs, n)
    ends = Span(0, 1) | Span(n - 1, n)
    assert time.step_s(Span(0, 1)) < time.step_s(ends) < time.step_s(Span(0, n)) * 1.5
    assert memory.peak_bytes(Span(0, 1)) < memory.peak_bytes(ends)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variant": "q"}, "unknown variant 'q'; expected one of f, ff, qff"),
        ({"method": "depth"}, "unknown method"),
        ({"backend": "cuda"}, "unknown backend"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_settings_that_are_refused(arguments, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        Settings("mobilenet", **arguments)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mobilnet", "did you mean mobilenet"),
        ("no.such.module:net", "cannot import no.such.module:net"),
        ("{own}:none", "cannot import"),
        ("{own}:OWN", "cannot import"),
        ("{own}:number", "gave a int"),
    ],
)
def test_models_that_are_refused(own: str, name: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        Settings(name.format(own=own.partition(":")[0])).build()


def test_widths_need_a_factory_that_takes_one(own: str) -> None:
    with pytest.raises(InvalidModel, match="takes no width="):
        Settings(own.replace(":net", ":fixed")).build(0.5)


def test_an_analytic_table_of_a_model_with_one_batch_size(own: str) -> None:
    module, _ = own.split(":")
    table = analytic_table(Settings(f"{module}:for_batches_of_eight", batch=8))
    assert table.n_blocks >= 2


def test_an_unknown_device_of_the_analytic_table(own: str) -> None:
    with pytest.raises(InvalidSetting, match="expected one of x64, pi4"):
        analytic_table(Settings(own), "abacus")


def test_devices_that_were_computed_say_so_and_are_ordered_as_their_makers_do(own: str) -> None:
    assert all("computed, not measured" in DEVICES[name].basis for name in set(DEVICES) - {"x64"})
    assert (DEVICES["pi4"].float32_macs_per_s, DEVICES["pi4"].bytes_per_s) == (12e9, 3.2e9)
    assert DEVICES["pi5"].int8_macs_per_s == pytest.approx(1.93 * 0.5 * 4 * 2.4e9 * 8)
    assert DEVICES["pi4"].int8_macs_per_s == pytest.approx(1.30 * 12e9)
    flagship = DEVICES["phone-flagship"]
    assert flagship.float32_macs_per_s == pytest.approx(70.4e9)
    full = {name: analytic_table(Settings(own), name).full_step_s for name in DEVICES}
    assert full["pi4"] > full["phone-entry"] > full["phone-flagship"]
    assert full["pi4"] > full["pi5"] > full["jetson-orin-nano"]


def test_the_documentation_has_the_rates_of_devices() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/profile-tables.md").read_text()
    for name, device in DEVICES.items():
        (line,) = re.findall(rf"^\| `{name}` .*$", page, re.M)
        told = [float(x) for cell in line.split("|")[-3:-1] for x in re.findall(r"[\d.]+", cell)]
        exact = [device.float32_macs_per_s, device.int8_macs_per_s, device.bytes_per_s]
        assert told == pytest.approx([value / 1e9 for value in exact], rel=0.02)
