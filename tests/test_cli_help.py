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

from cocofl.cli import app, main

BIN = Path(sys.executable).parent
COMMANDS = [
    (name,) if not hasattr(command, "commands") else (name, below)
    for name, command in typer.main.get_command(app).commands.items()
    for below in getattr(command, "commands", [""])
]


def called(capsys, *words: str) -> tuple[int, str, str]:
    # In this process, for speed; other tests start real ones.
    with pytest.raises(SystemExit) as stopped:
        main(list(words))
    code = stopped.value.code
    assert isinstance(code, int)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_help_groups_commands_by_job_with_an_example_each(capsys):
    code, shown, _ = called(capsys, "--help")
    assert code == 0
    for words in ("Compare methods", "Ask what fits a device", "Look at data"):
        assert words in shown
    for command in COMMANDS:
        assert f"cocofl {command[0]}" in shown


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_an_example(capsys, command):
    code, shown, _ = called(capsys, *command, "--help")
    assert code == 0
    assert f"Example: cocofl {' '.join(command)}" in shown


def test_bash_completes_commands_options_and_names():
    script = """
    source <(cocofl --show-completion bash)
    complete_line() {
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
        _cocofl_completion cocofl
        echo "${COMPREPLY[*]}"
    }
    complete_line cocofl re
    complete_line cocofl report --fi
    complete_line cocofl profile mobilenet-
    """
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["report", "reproduce"],
        ["--figures"],
        ["mobilenet-groupnorm", "mobilenet-large"],
    ]


def test_the_doctor_examines_the_machine(capsys):
    code, shown, _ = called(capsys, "doctor")
    assert code == 0
    assert "kernel onednn" in shown
    _, shown, _ = called(capsys, "doctor", "--json")
    found = {finding["what"]: finding for finding in json.loads(shown)}
    assert found["kernel reference"]["state"] == "good"
    assert "digits" in found["data here"]["found"]
    assert found["torch"]["found"].startswith("2.")


def test_a_report_of_several_runs(capsys, tmp_path):
    for strategy in ("cocofl", "fedavg"):
        made_up_run(tmp_path / strategy, strategy, "rc", 0, rounds=3)
    out = tmp_path / "page.html"
    words = ("report", str(tmp_path / "cocofl"), str(tmp_path / "fedavg"), "--out", str(out))
    code, shown, _ = called(capsys, *words, "--json")
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
def test_a_users_mistake_has_one_message(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, shown, error = called(capsys, *words)
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
