"""Profile tables: the formats read and written, and the broken files that are refused."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from cocofl import Budget, ProfileTable, Span, all_spans, feasible, maximal
from cocofl.errors import InvalidTable, OtherHardware, TableMismatch
from cocofl.profiling import Cost, Hardware, shipped

ROOT = Path(__file__).parents[2]
PAPER = Path(os.environ.get("COCOFL_PAPER", ROOT.parent / "shared" / "paper"))


def costs(n_blocks: int = 3, rss: bool = True) -> dict[Span, Cost]:
    return {
        span: Cost(
            0.01 * len(span), 1000 * len(span) if rss else None, 700 * len(span), 40 * len(span)
        )
        for span in all_spans(n_blocks)
    }


def table(**changes) -> ProfileTable:
    facts = {
        "model": "toy",
        "method": "span",
        "variant": "qff",
        "backend": "auto",
        "source": "measured",
        "batch": 32,
        "hardware": Hardware.here(),
        "n_blocks": 3,
    }
    return ProfileTable.from_costs(changes.pop("costs", costs()), **(facts | changes))


def saved(tmp_path: Path, **changes) -> Path:
    path = tmp_path / "table.json"
    table(**changes).save(path)
    return path


def paper_table(name: str) -> ProfileTable:
    path = PAPER / "tables" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"the paper's tables are not at {PAPER}; set COCOFL_PAPER to their folder")
    return ProfileTable.load(path)


def test_a_saved_table_reads_back(tmp_path: Path) -> None:
    path = saved(tmp_path)
    found = ProfileTable.load(path, n_blocks=3)
    assert found.spans == tuple(all_spans(3))
    assert found.costs == table().costs
    assert found.hardware == Hardware.here()
    assert found.row(Span(0, 3)) == (1.0, 1.0, 1.0)
    assert found.row(Span(1, 2)) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_a_width_table_reads_back(tmp_path: Path) -> None:
    widths = {0.5: Cost(0.02, None, 50, 25), 1.0: Cost(0.04, None, 100, 100)}
    path = saved(tmp_path, costs=widths, method="width", variant="")
    found = ProfileTable.load(path)
    assert found.widths == (0.5, 1.0)
    assert found.row(0.5) == (0.5, 0.5, 0.25)
    with pytest.raises(TableMismatch, match="widths, not spans"):
        feasible(found, Budget())


def test_memory_is_the_rss_peak_where_measured_and_else_the_tensor_peak() -> None:
    assert table().memory_kind == "rss"
    assert table().full_memory_bytes == 3000
    without = table(costs=costs(rss=False))
    assert without.memory_kind == "tensor"
    assert without.full_memory_bytes == 2100
    assert "tensor memory" in without.describe()


def test_a_table_states_what_the_process_holds_beside_training(tmp_path: Path) -> None:
    found = ProfileTable.load(saved(tmp_path, process_bytes=378_000_000))
    assert found.process_bytes == 378_000_000
    assert found.full_memory_bytes == 3000
    assert found.describe().endswith("resident memory that training adds to the process's 378 MB")


def test_a_table_of_before_memory_was_what_training_adds_is_read(tmp_path: Path) -> None:
    content = json.loads(saved(tmp_path).read_text())
    assert "process_bytes" not in content
    del content["checksum"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(content))
    found = ProfileTable.load(path)
    assert found.process_bytes is None
    assert found.describe().endswith("resident memory, part of the process's own counted in")


def test_an_analytic_table_says_so() -> None:
    assert "nothing was measured" in table(source="analytic").describe()


def test_absolute_budgets_count_steps_and_bytes() -> None:
    # 500 samples are 16 batches of 32: a full epoch takes 16 × 0.03 s.
    fits = feasible(table(), Budget(time_s=0.33, memory_bytes=2500, upload_bytes=80, samples=500))
    assert [str(span) for span in fits] == ["0:1", "0:2", "1:2", "1:3", "2:3"]
    assert len(feasible(table(), Budget(time_s=0.31, samples=500))) == 3


@pytest.mark.parametrize("name", ["arm_densenet40", "arm_resnet18", "x64_mobilenet",
    "x64_mobilenetgroupnorm", "x64_mobilenetlarge", "x64_resnet50", "x64_transformer",
    "x64_transformerseq2seq"])  # fmt: skip
def test_the_papers_tables_are_read_as_they_are(name: str) -> None:
    found = paper_table(name)
    assert found.spans == tuple(all_spans(found.n_blocks))
    assert found.source == "published"
    assert found.row(Span(0, found.n_blocks)) == pytest.approx((1, 1, 1), abs=1e-3)


def test_mobilenet_of_the_paper() -> None:
    found = paper_table("x64_mobilenet")
    assert len(found) == 210
    assert found.time.min() == pytest.approx(0.091, abs=5e-4)
    assert found.memory.min() == pytest.approx(0.104, abs=5e-4)
    assert feasible(found, Budget(time=0.33, memory=0.33, upload=0.7))
    assert feasible(found, Budget(time_s=0.58245 * 16 * 0.33, samples=500)) == feasible(
        found, Budget(time=0.33)
    )
    with pytest.raises(TableMismatch, match="upload as fractions only"):
        feasible(found, Budget(upload_bytes=1e6))


def test_the_form_in_which_the_authors_publish(tmp_path: Path) -> None:
    content = [
        {"freeze": [], "time": 1.0, "data": 1.0, "memory": 1.0},
        {"freeze": [0, 1], "time": 0.2, "data": 0.5, "memory": 0.3},
        {"freeze": [1, 2], "time": 0.6, "data": 0.1, "memory": 0.7},
    ]
    path = tmp_path / "ResNet.json"
    path.write_text(json.dumps(content))
    found = ProfileTable.load(path)
    assert [str(span) for span in found.spans] == ["0:1", "0:3", "2:3"]
    assert found.row(Span(2, 3)) == (0.2, 0.3, 0.5)
    assert maximal(feasible(found, Budget(time=0.6))) == [Span(0, 1), Span(2, 3)]
    with pytest.raises(TableMismatch, match="no row for 0:2"):
        found.row(Span(0, 2))
    with pytest.raises(TableMismatch, match="time as fractions only"):
        # Nobody said how many seconds full training takes.
        feasible(found, Budget(time_s=3, samples=9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "no rows"),
        ([{"freeze": [0, 2], "time": 1, "data": 1}], "entry 0"),
        ([{"freeze": [1], "time": 1, "data": 1, "memory": 1}] * 2, "two rows for 0:1"),
        ([{"freeze": [1, 3], "time": 1, "data": 1, "memory": 1}], "contiguous"),
        ([{"freeze": [1], "time": float("nan"), "data": 1, "memory": 1}], "time of 0:1 is nan"),
        ({"rows": []}, "not a profile table"),
        (7, "not a profile table"),
    ],
)
def test_broken_published_tables(tmp_path: Path, content, message: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidTable, match=message):
        ProfileTable.load(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidTable, match="cocofl profile"):
        ProfileTable.load(tmp_path / "none.json")


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.95])
def test_a_truncated_file(tmp_path: Path, kept: float) -> None:
    path = saved(tmp_path)
    text = path.read_text()
    path.write_text(text[: int(kept * len(text))])
    with pytest.raises(InvalidTable, match="truncated"):
        ProfileTable.load(path)


def edited(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_hand_edited_file_is_noticed_unless_it_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path)
    edited(path, lambda content: content["rows"][2].__setitem__(2, 0.5))
    with pytest.raises(InvalidTable, match="was changed after it was written"):
        ProfileTable.load(path)
    edited(path, lambda content: content.pop("checksum"))
    assert ProfileTable.load(path).costs[2].step_s == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["rows"].pop(1), "5 of the 6 spans of 3 blocks; missing are 0:2"),
        (lambda c: c["rows"].append(c["rows"][0]), "two rows for 0:1"),
        (lambda c: c["rows"][0].__setitem__(2, float("nan")), "step_s of 0:1 is nan"),
        (lambda c: c["rows"][0].__setitem__(2, -1.0), "step_s of 0:1 is -1.0"),
        (lambda c: c["rows"][0].__setitem__(4, 0), "tensor_bytes of 0:1 is 0"),
        (lambda c: c["rows"][0].__setitem__(5, "much"), "upload_bytes of 0:1 is 'much'"),
        (lambda c: c["rows"][0].__setitem__(1, 9), "0:9 is not a span of a chain of 3 blocks"),
        (lambda c: c["rows"].__setitem__(0, [1]), "row 0"),
        (lambda c: c.__setitem__("rows", []), "no rows"),
        (lambda c: c.__setitem__("n_blocks", 2), "not a span of a chain of 2 blocks"),
        (lambda c: c.__setitem__("n_blocks", None), "n_blocks is None"),
        (lambda c: c.__setitem__("method", "depth"), "method is 'depth'"),
        (lambda c: c.__setitem__("source", "guess"), "source is 'guess'"),
        (lambda c: c.__setitem__("columns", []), "columns are"),
        (lambda c: c.__setitem__("hardware", {"cpu": 1}), "not a complete profile table"),
        (lambda c: c.pop("model"), "not a complete profile table"),
    ],
)
def test_broken_tables_say_what_is_wrong(tmp_path: Path, change, message: str) -> None:
    path = saved(tmp_path)
    edited(path, lambda content: (content.pop("checksum"), change(content)))
    with pytest.raises(InvalidTable, match=message):
        ProfileTable.load(path)


def test_a_table_for_another_number_of_blocks(tmp_path: Path) -> None:
    with pytest.raises(TableMismatch, match=r"is for 3 blocks \(toy\), but the model has 20"):
        ProfileTable.load(saved(tmp_path), n_blocks=20)


def test_other_hardware_warns_and_names_both(tmp_path: Path) -> None:
    elsewhere = replace(Hardware.here(), cpu="Cortex-A72")
    path = saved(tmp_path, hardware=elsewhere)
    with pytest.warns(OtherHardware, match="Cortex-A72") as caught:
        ProfileTable.load(path)
    assert Hardware.here().cpu in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ProfileTable.load(saved(tmp_path, hardware=Hardware.here(threads=7)))


def test_an_unknown_shipped_table_names_those_there_are() -> None:
    with pytest.raises(InvalidTable, match="there is no table 'measured:pdp11-eliza'"):
        ProfileTable.load("measured:pdp11-eliza")


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_table_loads_without_a_warning(name: str) -> None:
    assert len(ProfileTable.load(name)) > 1


def test_fractions_stay_in_their_own_format(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[{"freeze": [1], "time": 1, "data": 1, "memory": 1}]')
    with pytest.raises(InvalidTable, match="fractions only"):
        ProfileTable.load(path).save(tmp_path / "copy.json")
