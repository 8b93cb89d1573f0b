"""The classifier beside a span: tables that have it, and tables that it is derived from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cocofl import ProfileTable, Span, all_spans, freeze, split
from cocofl.errors import InvalidTable, TableMismatch
from cocofl.freeze import upload_sizes
from cocofl.models import MODELS
from cocofl.profiling import shipped
from cocofl.profiling.analytic import analytic_table
from cocofl.profiling.configurations import spans_with_head
from cocofl.profiling.cost_model import fast_table
from cocofl.profiling.subject import Settings, training_step
from cocofl.profiling.table import SHIPPED, beside_head, spans_alone
from cocofl.span import Blocks

MODEL = "resnet10-digits"


@pytest.mark.parametrize("variant", ["f", "qff"])
def test_what_is_derived_from_spans_is_what_counting_says(variant: str) -> None:
    derived = beside_head(analytic_table(Settings(MODEL, variant=variant, batch=8)))
    counted = analytic_table(Settings(MODEL, variant=variant, batch=8, head=True))
    assert derived.configurations == counted.configurations
    assert "derived" in derived.describe()
    assert derived.time == pytest.approx(counted.time, rel=1e-4)
    assert derived.upload == pytest.approx(counted.upload, rel=1e-9)
    assert (derived.memory >= counted.memory - 1e-9).all()
    assert (derived.memory <= 1.0 + 1e-9).all()


@pytest.mark.parametrize("name", [name for name in shipped() if not name.endswith("/width")])
def test_the_classifier_costs_something_in_every_table_that_ships(name: str) -> None:
    table = ProfileTable.load(name)
    derived, last = beside_head(table), Span(table.n_blocks - 1, table.n_blocks)
    for span in all_spans(table.n_blocks):
        both = span | last
        if isinstance(both, Span):  # measured
            assert derived.row(both) == table.row(both)
            continue
        time, memory, upload = derived.row(both)
        assert time >= table.row(span)[0]
        assert memory >= table.row(span)[1]
        assert upload == pytest.approx(table.row(span)[2] + table.row(last)[2])


def test_a_measured_table_of_spans_with_the_classifier(tmp_path: Path) -> None:
    *_, table = fast_table(Settings(MODEL, batch=2, threads=1, head=True))
    assert isinstance(table, ProfileTable)
    assert list(table.configurations) == spans_with_head(range(table.n_blocks))
    table.save(tmp_path / "head.json")
    content = json.loads((tmp_path / "head.json").read_text())
    assert content["columns"][0] == "blocks"
    assert content["rows"][0][0] == "0:1+5:6"
    found = ProfileTable.load(tmp_path / "head.json")
    assert (found.configurations, found.costs) == (table.configurations, table.costs)
    assert beside_head(found).configurations == found.configurations
    with pytest.raises(TableMismatch, match=r"set strategy\.head = true, or give a table"):
        spans_alone(found)


def test_a_table_may_have_both_and_each_is_found_in_it() -> None:
    both = analytic_table(Settings(MODEL, batch=8))
    head = analytic_table(Settings(MODEL, batch=8, head=True))
    costs = dict(zip(both.configurations, both.costs, strict=True))
    costs |= dict(zip(head.configurations, head.costs, strict=True))
    facts = {"n_blocks": 6, "model": MODEL, "method": "span", "variant": "qff"}
    table = ProfileTable.from_costs(costs, source="analytic", **facts)
    assert np.array_equal(spans_alone(table).time, both.time)
    assert np.array_equal(beside_head(table).memory, head.memory)


@pytest.mark.parametrize("name", shipped())
def test_tables_that_ship_are_written_as_they_are_read(name: str, tmp_path: Path) -> None:
    ProfileTable.load(name).save(tmp_path / "again.json")
    file = SHIPPED / f"{name.removeprefix('measured:').replace('/', '+')}.json"
    assert (tmp_path / "again.json").read_bytes() == file.read_bytes()


@pytest.mark.parametrize("key", ["0:9", "0:2+1:", 3, None, "1:1"])
def test_blocks_that_the_network_does_not_have(key: object, tmp_path: Path) -> None:
    analytic_table(Settings(MODEL, batch=8, head=True)).save(tmp_path / "head.json")
    content = json.loads((tmp_path / "head.json").read_text())
    content["rows"][0][0] = key
    del content["checksum"]
    (tmp_path / "head.json").write_text(json.dumps(content))
    with pytest.raises(
        InvalidTable, match=f"{re.escape(str(key))} is not a span of a chain of 6 blocks"
    ):
        ProfileTable.load(tmp_path / "head.json")


@pytest.mark.parametrize("name", MODELS)
def test_the_size_of_an_upload_is_that_of_the_update(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name](4, tiny=True)
    inputs = (model.example_input(2),)
    chain = split(model, inputs)
    for blocks in (Span(0, len(chain)), Blocks("0:1") | Span(len(chain) - 1, len(chain))):
        net = freeze(chain, blocks, backend="reference")
        step = training_step(net, inputs)
        step()
        assert net.update().nbytes == sum(upload_sizes(chain, scales=False)[i] for i in blocks)
        net.measure_scales()
        step()
        assert net.update().nbytes == sum(upload_sizes(chain, scales=True)[i] for i in blocks)
