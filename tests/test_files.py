"""Files are read within limits, and written with the permissions that the user wants."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cocofl.config import Experiment
from cocofl.errors import CocoflError, InvalidExperiment, InvalidTable
from cocofl.files import (
    append_text,
    parsed_json,
    parsed_toml,
    read_csv,
    read_limited,
    read_lines,
    write_text,
)
from cocofl.fl.devices import read_trace
from cocofl.freeze import KernelPlan
from cocofl.profiling import ProfileTable
from cocofl.reproduction import results
from cocofl.runlog import RunFolder, read_state

BENCH = Path(__file__).parents[1] / "bench"


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"1234")
    assert read_limited(path, 4) == b"1234"
    with pytest.raises(OSError, match="it has 4 bytes, and at most 3 are read"):
        read_limited(path, 3)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "pipe"])
def test_what_is_no_plain_file_is_not_opened(path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a plain file"):
        read_limited(tmp_path / path)


def test_lines_are_limited_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"12\n345\n67")
    assert list(read_lines(path, 4, 100)) == [b"12", b"345"]  # the last is not complete
    with pytest.raises(OSError, match="a line of more than 2 bytes"):
        list(read_lines(path, 2, 100))
    with pytest.raises(OSError, match="at most 8 are read"):
        list(read_lines(path, 4, 8))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 10_000, "nested too deeply"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' stands there twice"),
        ("\xff", "Expecting value"),
        (b"\xff", "can't decode"),
        ("9" * 5000, "integer string conversion"),
    ],
)
def test_json_that_is_none(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 10_000, "nested too deeply"),
        ("a = " + "[" * 40 + "]" * 40, "nested too deeply"),
        ("a = 0x" + "f" * 20, "more than 64 bits"),
        ("a = [{b = 0xfffffffffffffffff}]", "more than 64 bits"),
        ("a = " + "9" * 5000, "integer string conversion"),
        (".".join("a" * 100_000) + " = 1", "more than 32 parts"),
        ('"="."="' + ' . "x"' * 100_000 + " = 1", "more than 32 parts"),
        ("[" + ".".join("a" * 50_000) + "]\n" + "b = 1\n" * 9, "more than 32 parts"),
        (b"\xff", "can't decode"),
    ],
)
def test_toml_that_is_none(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed_toml(text)


def test_texts_may_have_as_many_dots_as_they_like() -> None:
    dots = ".".join("a" * 100)
    assert parsed_toml(f"a = \"{dots}\"\nb = '{dots}'\nc = [{'0.5, ' * 100}]")["b"] == dots


def test_rows_have_the_columns_of_their_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1\n2,3\n")
    assert list(read_csv(path)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]
    for text, message in (("a,b\n1,2,3\n", "more cells"), ("a,a\n1,2\n", "two columns")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            list(read_csv(path))


# --- every reader --------------------------------------------------------------------------------

READERS = {
    "table": ProfileTable.load,
    "experiment": Experiment.load,
    "plan": KernelPlan.load,
    "state": read_state,
    "trace": read_trace,
    "results": results.read,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("path", ["/dev/zero", "/", "nowhere", "/proc/self/mem"])
def test_every_reader_refuses_what_is_no_file(read, path: str, tmp_path: Path) -> None:
    with pytest.raises(CocoflError, match=re.escape(path)):
        read(tmp_path / path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"freeze": [99999999], "time": 1, "data": 1, "memory": 1}]', "more than 1024 blocks"),
        (
            '{"format": "cocofl profile table 1", "method": "span", "source": "measured", '
            '"n_blocks": 1000, "columns": ["start", "stop", "step_s", "rss_bytes", "tensor_bytes",'
            ' "upload_bytes"], "rows": [[0, 1, 0.1, 1, 1, 1]]}',
            "has 1 of the 500500 spans of 1000 blocks; missing are 0:2, 0:3, 0:4, 0:5, 0:6, …",
        ),
        (
            '{"unit": 1, "columns": ["start", "stop", "time", "memory", "upload"], "n_blocks": '
            '3000, "rows": [[0, 1, 1, 1, 1]]}',
            "n_blocks is 3000; expected a whole number from 1 to 1024",
        ),
    ],
)
def test_a_small_table_of_many_blocks_costs_nothing(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(InvalidTable, match=message):
        ProfileTable.load(tmp_path / "table.json")


def test_bases_end(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    (tmp_path / "12.toml").write_text("rounds = 7\n")
    assert Experiment.load(tmp_path / "4.toml").rounds == 7
    with pytest.raises(InvalidExperiment, match="more than 8 files rest on each other"):
        Experiment.load(tmp_path / "0.toml")
    (tmp_path / "0.toml").write_text('base = "/dev/zero"\n')
    with pytest.raises(InvalidExperiment, match=r"/dev/zero: .*not a plain file"):
        Experiment.load(tmp_path / "0.toml")


# --- checksums -----------------------------------------------------------------------------------


def kept(folder: Path) -> Path:
    RunFolder(folder).save_checkpoint(3, {"w": torch.arange(4.0), "b": torch.zeros(2)})
    return folder / "checkpoint.safetensors"


@pytest.mark.parametrize("at", [20, 60, 90, -1, -9])
def test_a_state_with_a_changed_bit_is_refused(at: int, tmp_path: Path) -> None:
    path = kept(tmp_path)
    assert read_state(path)[0] == 3
    changed = bytearray(path.read_bytes())
    changed[at] ^= 1
    path.write_bytes(changed)
    with pytest.raises(CocoflError, match=re.escape(str(path))):
        read_state(path)


def test_who_has_a_changed_checkpoint_is_told_what_to_do(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CocoflError, match=r"its checksum .*, or remove the file: --resume"):
        RunFolder(tmp_path).rewind()


def test_states_of_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    path = tmp_path / "old.safetensors"
    state = {"w": torch.arange(4.0)}
    save_file(state, path, {"rounds": "5"})
    assert read_state(path)[0] == 5
    save_file(state, path, {"format": "pt"})  # of somebody else
    assert torch.equal(read_state(path)[1]["w"], state["w"])
    save_file(state, path, {"rounds": "5", "sha257": "0"})
    with pytest.raises(CocoflError, match="it says 'sha257' of itself"):
        read_state(path)
    assert torch.equal(load_file(kept(tmp_path))["w"], state["w"])  # others read ours


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_every_file_of_a_run_has_the_permissions_of_the_user_s_files(
    umask: int, expected: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "run" / "text", "a")
        append_text(tmp_path / "run" / "log", "a\n")
        KernelPlan({"conv": "reference"}).save(tmp_path / "run" / "plan.json")
        kept(tmp_path / "run")
    finally:
        os.umask(before)
    files = list((tmp_path / "run").iterdir())
    assert len(files) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected}


CHOOSING = """
import os, sys
from cocofl.experiment.engines import machine_plan, remember_plan
from cocofl.freeze import KernelPlan
children = []
go, start = os.pipe()
for number in range(50):
    child = os.fork()
    if not child:
        os.close(start)
        os.read(go, 1)  # all at once
        remember_plan(KernelPlan({f"map {number}": "reference"}))
        os._exit(0)
    children.append(child)
os.close(start)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
print(len(machine_plan().choices))
"""


@pytest.mark.slow
def test_fifty_processes_that_share_a_cache_keep_all_choices(tmp_path: Path) -> None:
    environment = {**os.environ, "COCOFL_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHOOSING],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("50\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["kernels"]  # no lock is left behind


def test_some_mutants_of_every_kind_of_file(tmp_path: Path) -> None:
    """All of them, and updates: ``make test-hostile``."""
    files = ("table", "experiment", "metrics", "about", "plan", "state", "split", "results")
    limits = ("--count", "600", "--processes", "1", "--kinds", *files)
    words = [sys.executable, BENCH / "hostile_files.py", *limits]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["foreign exceptions"] == 0
