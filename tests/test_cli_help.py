"""What the command line tells a newcomer: help, completion, the machine, a page at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from bench.report import made_up_run

from cocofl.cli import app
from tests.command_line import Call

BIN = Path(sys.executable).parent
COMMANDS = [
    (name,) if not hasattr(command, "commands") else (name, below)
    for name, command in typer.main.get_command(app).commands.items()
    for below in getattr(command, "commands", [""])
]


def test_help_groups_commands_by_job_with_an_example_each(call: Call):
    code, shown, _ = call("--help")
    assert code == 0
    for words in ("Compare methods", "Ask what fits a device", "Look at data"):
        assert words in shown
    for command in COMMANDS:
        assert f"cocofl {command[0]}" in shown


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example(call: Call, command):
    code, shown, _ = call(*command, "--help")
    assert code == 0
    assert f"Example: cocofl {' '.join(command)}" in shown


def test_bash_completes_options_and_names():
    script = """
    source <(cocofl --show-completion bash)
    complete_line() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _cocofl_completion cocofl
        echo "${COMPREPLY[*]}"
    }
    complete_line cocofl report --fi
    complete_line cocofl profile mobilenet-
    """
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["--figures"],
        ["mobilenet-groupnorm", "mobilenet-large"],
    ]


def test_the_doctor_examines_the_machine(call: Call):
    code, shown, _ = call("doctor")
    assert code == 0
    assert "kernel onednn" in shown
    _, shown, _ = call("doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(shown)}
    assert found["kernel reference"]["state"] == "good"
    assert "digits" in found["data here"]["found"]
    assert found["torch"]["found"].startswith("2.")


def test_a_report_of_several_runs(call: Call, tmp_path):
    for strategy in ("cocofl", "fedavg"):
        made_up_run(tmp_path / strategy, strategy, "rc", 0, rounds=3)
    out = tmp_path / "page.html"
    words = ("report", str(tmp_path / "cocofl"), str(tmp_path / "fedavg"), "--out", str(out))
    code, shown, _ = call(*words, "--json")
    assert code == 0
    assert out.stat().st_size > 1e6
    (scene,) = json.loads(shown)["scenes"]
    assert [row["label"] for row in scene["rows"]] == ["cocofl", "fedavg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "nowhere is not a folder"),
        (["report", "."], "holds no run"),
        (["run", "--set", "rounds"], "expected key=value"),
        (["run", "nothing.toml"], "cannot read nothing.toml"),
    ],
)
def test_a_users_mistake_has_one_message(call: Call, words, message):
    code, shown, error = call(*words)
    assert (code, shown) == (2, "")
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_without_the_library_it_says_how_to_get_it(tmp_path):
    made_up_run(tmp_path / "run", "cocofl", "rc", 0, rounds=2)
    code = (
        "import sys; sys.modules['plotly'] = None; from cocofl.cli import main; "
        "main(['report', 'run'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: a report needs the library plotly: pip install 'cocofl[report]'\n"
