"""The command line: what it prints, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import Call, in_a_process


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("COCOFL_DATA", "")


def test_help_shows_the_commands_and_an_example(call: Call, tmp_path: Path) -> None:
    assert "data" in in_a_process("--help", cwd=tmp_path).stdout
    shown = call("data", "show", "--help")
    assert shown.returncode == 0
    assert "Example: cocofl data show digits" in shown.stdout


def test_data_list_names_every_data_set_and_how_to_get_it(call: Call) -> None:
    result = call("data", "list")
    assert result.returncode == 0
    assert "digits" in result.stdout
    assert "on the Hub: uoft-cs/cifar10" in result.stdout
    assert "unpack NIH's ChestX-ray14" in result.stdout
    assert "\x1b" not in result.stdout
    entries = json.loads(call("data", "list", "--json").stdout)
    assert entries[0]["name"] == "digits"
    assert {"train_samples", "test_samples", "num_classes", "state", "place"} <= set(entries[0])


def test_data_show_draws_the_chart_and_prints_the_densities(call: Call, tmp_path: Path) -> None:
    result = call("data", "show", "digits", "--split", "rc", "--alpha", "0.1", "--devices", "30")
    assert result.returncode == 0, result.stderr
    assert "strong" in result.stdout
    assert "30 devices with 47 samples each; 28 left over." in result.stdout
    with Image.open(tmp_path / "digits-rc.png") as image:
        assert image.format == "PNG"


def test_data_show_as_json(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "charts" / "iid.png"
    result = call(
        "data", "show", "digits", "--split", "iid", "--devices", "7", "--groups", "2",
        "--out", str(out), "--json", "--unequal",
    )  # fmt: skip
    shown = json.loads(result.stdout)
    assert shown["samples_per_device"] == [205, 206]
    assert sum(shown["densities"]["group 0"]) == pytest.approx(1)
    assert out.exists()


def test_ones_own_data_from_the_current_folder(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def load(data_dir):\n"
        "    images = np.zeros((20, 4, 4, 1), np.uint8)\n"
        "    return {'train': (images, np.arange(20) % 2), 'test': (images[:2], [0, 1])}\n"
    )
    result = call("data", "show", "mine:load", "--split", "iid", "--devices", "5")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "mine.load-iid.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "digitz"], "did you mean digits"),
        (["show", "digits", "--alpha", "0"], "alpha = 0.0"),
        (["show", "digits", "--devices", "5000"], "1438 samples cannot be split over 5000"),
        (["show", "digits", "--split", "rcc"], "did you mean rc"),
        (["show", "digits", "--split", "natural"], "who owns each sample"),
        (["show", "digits", "--groups", "0"], "cannot form 0 groups"),
        (["show", "digits", "--out", "chart.jpgg"], "must end in .png or .svg or .pdf"),
        (["show", "digits", "--out", "."], "cannot write .: Is a directory; choose another --out"),
        (["list", "--data-dir", "nowhere"], "no such folder"),
    ],
)
def test_a_users_mistake_is_one_message_and_exit_code_2(
    call: Call, arguments: list[str], message: str
) -> None:
    failed = call("data", *arguments)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: ")
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert failed.stdout == ""


def test_debug_shows_where_it_went_wrong(call: Call) -> None:
    plain = call("data", "show", "digitz")
    assert plain.returncode == 2
    assert plain.stderr.startswith("error: no data set 'digitz'")
    result = call("data", "show", "digitz", "--debug")
    assert result.returncode == 2
    assert "Traceback" in result.stderr
    assert "DataNotFound" in result.stderr


def test_a_mistyped_command_or_option(call: Call) -> None:
    assert call("data", "shwo").returncode == 2
    assert call("data", "show", "digits", "--devices", "many").returncode == 2


def test_a_data_function_that_raises_is_named_with_its_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def samples(_folder):\n    return 1 / 0\n")
    result = call("data", "show", "own:samples")
    assert result.returncode == 2
    assert "own:samples failed with ZeroDivisionError: division by zero (line 2 " in result.stderr
