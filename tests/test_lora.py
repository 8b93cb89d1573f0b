"""``strategy.train = "lora"``: whole runs, their tables, and what is refused before them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cocofl import Experiment, ProfileTable, Run, Span, freeze, simulate
from cocofl.cli import main
from cocofl.engine.cohort import CohortExecutor, TrainedAlone
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError, InvalidTable, TableMismatch
from cocofl.experiment import evaluate_run, model_with
from cocofl.experiment.setup import Setup
from cocofl.fl.trainer import Task
from cocofl.flower.updates import Contract
from cocofl.freeze import AdaptedChain, upload_sizes
from cocofl.freeze.adapters import PREFIX
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.configurations import Cost
from cocofl.profiling.cost_model import fast_table
from cocofl.profiling.measure import Measurement, measure_here
from cocofl.profiling.subject import Settings, prepare
from cocofl.profiling.sweep import sweep
from cocofl.runlog import RoundRecord
from cocofl.strategies import SpanWork

MODEL = f"{__name__}:net"
LORA = {"train": "lora", "rank": 2, "alpha": 4.0}


def net(num_classes: int = 10) -> tuple[nn.Module, torch.Tensor]:
    """A block that has nothing to learn, two with adapters, and a head."""
    blocks = [nn.Sequential(nn.Linear(w, 12), nn.GELU()) for w in (64, 12)]
    first = nn.Sequential(nn.Flatten(), nn.LayerNorm(64))
    model = nn.Sequential(first, *blocks, nn.Linear(12, num_classes))
    return model, torch.rand(4, 1, 8, 8)


def lora(name: str = "cocofl", changes: dict[str, Any] | None = None, **options: Any) -> Experiment:
    content = {
        "rounds": 4,
        "model": {"name": MODEL},
        "devices": {"count": 6, "per_round": 3},
        "training": {"batch": 16, "lr": 0.2},
        "evaluation": {"every": 4},
        "strategy": {"name": name, **LORA, **options},
        "engine": {"kernels": "reference", "checkpoint_every": 1},
    }
    return Experiment.parse(content).changed(changes or {})


def play(experiment: Experiment, out: Path, **more: Any) -> Run:
    return simulate(experiment, out=out, executor=InProcess(), **more)


@pytest.mark.parametrize("name", ["cocofl", "fedavg", "fedavg-full"])
def test_a_run_trains_adapters_and_leaves_a_plain_model(name: str, tmp_path: Path) -> None:
    run = play(lora(name), tmp_path / name)
    setup = Setup(lora(name))
    first = setup.job().initial.tensors
    model = model_with(run)
    assert run.state.keys() >= model.state_dict().keys()
    assert not any(key.startswith(PREFIX) for key in run.state)
    moved = {key for key, t in model.state_dict().items() if not torch.equal(t, first[key])}
    assert moved == {"1.0.weight", "2.0.weight", "3.weight", "3.bias"}
    assert run.rounds[-1].loss < run.rounds[0].loss
    again = evaluate_run(run.path, executor=InProcess())
    assert again["accuracy"] == pytest.approx(run.final.scores["accuracy"])


class Stop:
    def on_round(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt

    def on_end(self) -> None: ...


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    whole = play(lora(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(lora(), tmp_path / "cut", watchers=[Stop()])
    cut = Run.open(tmp_path / "cut")
    assert any(key.startswith(PREFIX) for key in cut.state), "a checkpoint has the factors"
    half = Setup(lora()).trainer.merged(cut.state)
    model = model_with(cut)
    assert all(torch.equal(t, half[key]) for key, t in model.state_dict().items())
    again = play(lora(), tmp_path / "cut", resume=True)
    assert all(torch.equal(t, again.state[key]) for key, t in whole.state.items())
    assert whole.rounds == again.rounds


@pytest.mark.parametrize("variant", ["f", "qff"])
def test_what_is_sent_is_what_the_table_says(variant: str, tmp_path: Path) -> None:
    run = play(lora(variant=variant), tmp_path)
    setup = Setup(lora(variant=variant))
    table = setup.tables.spans(variant)
    scales = upload_sizes(setup.chain, scales=True) if variant == "qff" else None
    for record in run.rounds:
        works = [one.work for one in record.devices if one.fate == "merged"]
        rows = {str(c): cost.upload_bytes for c, cost in zip(table.spans, table.costs, strict=True)}
        most = sum(rows[str(work)] for work in works)
        if scales is None:
            assert record.bytes_up == most
        else:  # of scales tables say nothing
            assert most < record.bytes_up <= most + len(works) * (sum(scales) - rows["1:4"])


def test_costs_are_shares_of_training_everything() -> None:
    whole = analytic_table(Settings(MODEL, 16))
    found = {rank: analytic_table(Settings(MODEL, 16, rank=rank)) for rank in (1, 8)}
    assert [str(blocks) for blocks in found[8].spans] == ["1:2", "1:3", "1:4", "2:3", "2:4", "3:4"]
    for table in found.values():
        assert table.full_step_s == whole.full_step_s
        assert table.full_memory_bytes == whole.full_memory_bytes
        assert table.full_upload_bytes == whole.full_upload_bytes
        assert table.row(Span(1, 3))[2] < whole.row(Span(1, 3))[2]
    one, eight = (found[rank].row(Span(1, 3)) for rank in (1, 8))
    assert one[0] < eight[0]
    assert one[1] < eight[1]
    assert 8 * one[2] == pytest.approx(eight[2])


def test_a_table_of_adapters_is_kept_as_a_file(tmp_path: Path) -> None:
    analytic_table(Settings(MODEL, 16, rank=2)).save(tmp_path / "lora.json")
    found = ProfileTable.load(tmp_path / "lora.json", n_blocks=4)
    assert (found.rank, found.learning, str(found.everything)) == (2, (1, 2, 3), "1:4")
    assert "low-rank adapters of rank 2" in found.describe()
    content = json.loads((tmp_path / "lora.json").read_text())
    del content["checksum"]
    for wrong in ({"full": None}, {"full": [1.0]}, {"rank": 0}, {"rows": content["rows"][1:]}):
        (tmp_path / "wrong.json").write_text(json.dumps(content | wrong))
        with pytest.raises(InvalidTable):
            ProfileTable.load(tmp_path / "wrong.json")


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    for rank in (0, 2, 4):
        analytic_table(Settings(MODEL, 16, rank=rank)).save(tmp_path / f"{rank}.json")

    def use(rank: int, **options: Any) -> None:
        Setup(lora(changes={"tables.spans": str(tmp_path / f"{rank}.json")}, **options))

    use(2)
    with pytest.raises(
        TableMismatch, match=r'whole blocks costs, .* "lora" with rank 2; make a tab'
    ):
        use(0)
    with pytest.raises(TableMismatch, match=r"adapters of rank 4 costs, .* --train lora --rank 2"):
        use(4)
    with pytest.raises(TableMismatch, match=r'of rank 2 costs, .* train = "blocks"'):
        Setup(
            Experiment.parse(
                {"model": {"name": MODEL}, "tables": {"spans": str(tmp_path / "2.json")}}
            )
        )


@pytest.mark.slow
def test_costs_are_measured_with_adapters_in_place(tmp_path: Path) -> None:
    settings = Settings(MODEL, 8, rank=2, backend="reference")
    prepare(tmp_path, settings)
    sizes = upload_sizes(settings.chain()[0], scales=True)
    own, full = (measure_here(tmp_path, what).cost for what in (Span(1, 3), 1.0))
    assert own.upload_bytes == sizes[1] + sizes[2]
    assert full.upload_bytes > 3 * own.upload_bytes
    assert full.step_s > 0


def test_a_sweep_measures_spans_that_learn_and_full_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, asked = Settings(MODEL, 8, rank=2, backend="reference"), list[str]()
    monkeypatch.setattr("cocofl.profiling.sweep.prepare_apart", prepare)

    def measure_one(_folder: Path, configuration: Any) -> Measurement:
        asked.append(str(configuration))
        return Measurement(Cost(1.0, 1000, 1000, 100), 5000)

    out = tmp_path / "table.json"
    *_, _ = sweep(settings, out, n_blocks=4, learning=(1, 2, 3), measure_one=measure_one)
    table = ProfileTable.load(out)
    assert (table.source, table.rank, len(table)) == ("measured", 2, 6)
    assert table.full == Cost(1.0, 1000, 1000, 100)
    assert set(asked) == {"1.0", *map(str, table.spans)}


@pytest.mark.slow
def test_a_fast_table_predicts_the_same_spans() -> None:
    settings = Settings(MODEL, 8, rank=2, backend="reference")
    *_, table = fast_table(settings)
    assert isinstance(table, ProfileTable)
    counted = analytic_table(settings)
    assert table.spans == counted.spans
    assert table.full is not None
    assert counted.full is not None
    assert table.full.upload_bytes >= counted.full.upload_bytes


def test_profile_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank, code in (("2", 0), ("0", 2)):
        with pytest.raises(SystemExit) as ended:
            main(["profile", MODEL, "--train", "lora", "--rank", rank, "--analytic"])
        assert ended.value.code == code
    assert ProfileTable.load(f"{MODEL.replace(':', '.')}-qff-lora2.json").rank == 2


def test_the_head_beside_every_span() -> None:
    setup = Setup(lora(head=True))
    assert setup.strategy is not None
    counted = analytic_table(Settings(MODEL, 16, rank=2, head=True))
    assert [str(b) for b in counted.spans] == ["1:2+3:4", "1:4", "2:4", "3:4"]


def test_an_update_travels_by_the_contract() -> None:
    setup = Setup(lora())
    trainer, state = setup.trainer, setup.job().initial
    task = Task(0, 0, 0, setup.partition[0], SpanWork(Span(0, 3)), 0.1)
    sent = trainer.train(task, state)
    contract = Contract(trainer.chain())
    blocks, received = contract.decode(contract.encode(sent), state.tensors)
    assert str(blocks) == "1:3"
    assert received.tensors.keys() == sent.tensors.keys()
    assert all(torch.equal(t, sent.tensors[key]) for key, t in received.tensors.items())
    assert {key for key in sent.tensors if not key.startswith("scales.")} == {
        f"lora.{layer}.0.{factor}" for layer in (1, 2) for factor in ("down", "up")
    }


def test_a_cohort_says_that_it_trains_one_after_the_other(tmp_path: Path) -> None:
    serial = play(lora(), tmp_path / "serial")
    with pytest.warns(TrainedAlone, match="low-rank adapters have no stacked form"):
        cohort = simulate(lora(), out=tmp_path / "cohort", executor=CohortExecutor("cpu"))
    assert all(torch.equal(t, cohort.state[key]) for key, t in serial.state.items())
    assert cohort.final.scores["accuracy"] == pytest.approx(serial.final.scores["accuracy"])


def test_noise_falls_on_adapters_only(tmp_path: Path) -> None:
    run = play(lora("fedavg-full", {"privacy.clip": 1.0, "rounds": 1}), tmp_path)
    first = Setup(lora()).job().initial.tensors
    same = {key for key, t in run.state.items() if key in first and torch.equal(t, first[key])}
    assert same == {"0.1.weight", "0.1.bias", "1.0.bias", "2.0.bias"}


def test_codecs_and_robust_rules_see_adapters_as_any_tensor(tmp_path: Path) -> None:
    plain = play(lora(), tmp_path / "plain")
    ruled = play(lora(changes={"merge.rules": ["median"]}), tmp_path / "ruled")
    assert any(not torch.equal(t, ruled.state[key]) for key, t in plain.state.items())
    assert [r.bytes_up for r in ruled.rounds] == [r.bytes_up for r in plain.rounds]


def test_weights_of_an_earlier_run_get_new_adapters(tmp_path: Path) -> None:
    before = play(lora(), tmp_path / "before")
    setup = Setup(lora(changes={"model.init": str(before.path / "model.safetensors")}))
    initial = setup.job().initial.tensors
    assert isinstance(setup.chain, AdaptedChain)
    assert all(torch.equal(initial[k], t) for k, t in before.state.items())
    assert all(torch.equal(initial[k], t) for k, t in setup.chain.fresh_adapters(0).items())
    assert freeze(setup.chain, Span(1, 2), state=initial, backend="reference")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("heterofl", {}, "strategy.train is 'lora', but heterofl trains no blocks that could"),
        ("cocofl", {"rank": 0}, "the rank is 0"),
        ("cocofl", {"rank": 100}, "has a rank of at most 12"),
        ("cocofl", {"rank": "two"}, "strategy.rank is 'two'"),
        ("cocofl", {"train": "lorra"}, "strategy.train is 'lorra' .*expected one of blocks, lora"),
        ("cocofl", {"train": "blocks"}, "strategy.rank is of low-rank adapters, but strategy.tr"),
    ],
)
def test_what_cannot_be_is_refused_at_once(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(CocoflError, match=said):
        Setup(lora(name, **options))


def test_a_network_without_maps_is_refused() -> None:
    with pytest.raises(CocoflError, match="no linear map that could carry"):
        Setup(lora(changes={"model.name": f"{__name__}:only_a_head"}))


def only_a_head(num_classes: int = 10) -> tuple[nn.Module, torch.Tensor]:
    first = nn.Sequential(nn.Flatten(), nn.LayerNorm(64))
    return nn.Sequential(first, nn.Linear(64, num_classes)), torch.rand(4, 1, 8, 8)
