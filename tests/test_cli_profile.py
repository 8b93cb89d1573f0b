"""``cocofl profile`` and ``cocofl select``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cocofl import ProfileTable, all_spans
from cocofl.profiling import Cost, Hardware
from tests.command_line import Call, in_a_process

OWN = """
import torch
from torch import nn

def net(width=1.0):
    c = max(1, round(16 * width))
    model = nn.Sequential(nn.Linear(8, c), nn.ReLU(), nn.Linear(c, c), nn.ReLU(), nn.Linear(c, 3))
    return model, torch.randn(8, 8)
"""


@pytest.fixture(autouse=True)
def own_network(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)


def table_file(path: Path, hardware: Hardware | None = None) -> Path:
    costs = {
        span: Cost(0.01 * len(span), None, 1000 * len(span), 10 * len(span))
        for span in all_spans(4)
    }
    table = ProfileTable.from_costs(
        costs, n_blocks=4, model="toy", method="span", variant="qff", backend="auto",
        source="measured", batch=32, hardware=hardware or Hardware.here(),
    )  # fmt: skip
    table.save(path)
    return path


def test_profile_analytic_with_figures_then_select(call: Call, tmp_path: Path) -> None:
    made = call("profile", "own:net", "--analytic", "--batch", "8", "--out", "qff.json")
    assert made.returncode == 0, made.stderr
    assert "analytic: nothing was measured" in made.stdout
    widths = call("profile", "own:net", "--analytic", "--method", "width", "--batch", "8")
    assert widths.returncode == 0, widths.stderr
    drawn = call(
        "profile", "own:net", "--out", "qff.json", "--plot", "figure.png",
        "--with", "own.net-width.json",
    )  # fmt: skip
    assert drawn.returncode == 0, drawn.stderr
    assert {path.name for path in tmp_path.glob("figure*")} == {
        "figure.png", "figure.svg", "figure-blocks.png", "figure-blocks.svg",
    }  # fmt: skip
    assert call("select", "qff.json", "--time", "0.9").returncode == 0


def test_profile_fast(call: Call, tmp_path: Path) -> None:
    made = call("profile", "own:net", "--fast", "--variant", "f", "--batch", "8", "--threads", "1")
    assert made.returncode == 0, made.stderr
    assert "the rest predicted" in made.stdout
    assert "stated error" in made.stdout
    assert ProfileTable.load(tmp_path / "own.net-f.json").source == "fast"


def test_select_shows_spans_as_a_table_and_a_picture(tmp_path: Path) -> None:
    path = str(table_file(tmp_path / "table.json"))
    words = ("select", path, "--time", "0.5", "--memory", "0.5", "--upload", "0.7")
    shown = in_a_process(*words, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "7 of 10 spans fit time ≤ 0.5, memory ≤ 0.5, upload ≤ 0.7; 3 are maximal" in shown.stdout
    assert "░██▒" in shown.stdout
    assert "█ trained" in shown.stdout
    assert shown.stderr == ""


def test_select_as_json_with_seconds_and_bytes(call: Call, tmp_path: Path) -> None:
    path = str(table_file(tmp_path / "table.json"))
    # 500 samples are 16 steps; two blocks take 0.02 s each step.
    shown = call(
        "select", path, "--time", "0.33s", "--memory", "3kB", "--upload", "1MB",
        "--samples", "500", "--json",
    )  # fmt: skip
    found = json.loads(shown.stdout)
    assert found["maximal"] == ["0:2", "1:3", "2:4"]
    assert found["feasible"][0] == {"span": "0:1", "time": 0.25, "memory": 0.25, "upload": 0.25}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--time", "0.01"], "the nearest, span 0:1, needs of full training time 0.250"),
        (["--time", "3 parsecs"], "cannot read time = '3 parsecs'"),
        (["--time", "3s"], "samples"),
        (["--blocks", "20"], "is for 4 blocks (toy), but the model has 20"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    call: Call, tmp_path: Path, arguments: list[str], message: str
) -> None:
    failed = call("select", str(table_file(tmp_path / "table.json")), *arguments)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--classes", "0"], "num_classes is 0"),
        (["--threads", "0"], "threads is 0; expected at least 1"),
        (["--fast"], "--fast measures and --analytic does not; give one of them"),
        (["--out", "own.py/table.json"], "cannot write own.py/table.json: Not a directory;"),
        (["--plot", "own.py/figure"], "cannot write own.py/figure.png: Not a directory; choose an"),
    ],
)
def test_what_cannot_be_profiled_is_said_at_once(
    call: Call, arguments: list[str], message: str
) -> None:
    words = ("profile", "resnet10-digits", "--analytic", "--out", "t.json", *arguments)
    failed = call(*words)
    assert failed.returncode == 2
    assert message in failed.stderr
    assert not Path("t.json").exists()


def test_a_function_that_takes_the_number_of_classes_has_to_be_given_it(call: Call) -> None:
    Path("counted.py").write_text(
        "import torch\n"
        "def net(num_classes):\n"
        "    layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, num_classes)\n"
        "    return torch.nn.Sequential(*layers), torch.zeros(2, 4)\n"
    )
    words = ("profile", "counted:net", "--analytic", "--out", "t.json")
    failed = call(*words)
    assert failed.returncode == 2
    assert "counted:net takes num_classes; say --classes, like --classes 10" in failed.stderr
    assert call(*words, "--classes", "3").returncode == 0


def test_other_hardware_is_a_warning_that_names_both(call: Call, tmp_path: Path) -> None:
    elsewhere = replace(Hardware.here(), cpu="Cortex-A72")
    shown = call("select", str(table_file(tmp_path / "table.json", elsewhere)), "--time", "1")
    assert shown.returncode == 0
    assert shown.stderr.startswith("warning: ")
    assert "Cortex-A72" in shown.stderr
    assert Hardware.here().cpu in shown.stderr


def test_an_unknown_model_names_the_nearest(call: Call) -> None:
    failed = call("profile", "mobilnet", "--analytic")
    assert failed.returncode == 2
    assert "did you mean mobilenet" in failed.stderr


def test_select_counts_for_a_device_by_name(call: Call) -> None:
    for device, code, said in (
        ("pi5", 0, "pi5: computed, not measured: BCM2712, 4 Cortex-A76 at 2.4 GHz"),
        ("pi6", 2, "unknown device 'pi6' (did you mean pi5?)"),
    ):
        shown = call("select", f"analytic:{device}/cnn", "--time", "0.5")
        assert shown.returncode == code
        assert said in shown.stderr
        assert ("analytic:pi5/cnn: cnn, 6 spans" in shown.stdout) == (code == 0)
