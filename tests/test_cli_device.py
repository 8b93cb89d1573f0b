"""A machine becomes a device: what it is told, what is written, what is refused."""

from __future__ import annotations

import re
import stat
import tomllib
from pathlib import Path

import pytest
import typer.main

from cocofl.cli import app, main
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.flower.node_file import NodeFile

ROOT = Path(__file__).parent.parent
SECURE = ("--superlink", "fl.example.org:8000", "--root-certificates", "ca.crt")
OPEN = ("--superlink", "fl.example.org:8000", "--insecure", "--write-only")


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """In a folder with a table and an authority; the exit code, and what was said."""
    monkeypatch.chdir(tmp_path)
    Path("ca.crt").write_text("-----BEGIN CERTIFICATE-----\n")
    Path("data").mkdir()

    def run(*words: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as stopped:
            main(list(words))
        printed = capsys.readouterr()
        return stopped.value.code, printed.out + printed.err

    run("profile", "cnn", "--analytic", "--device", "pi4", "--out", "table.json")
    return run


def test_a_device_is_written_down_and_says_what_it_does(call) -> None:
    words = ("flower", "device", "pi", *SECURE, "--model", "cnn", "--table", "table.json")
    words += ("--trust", "task", "--data-dir", "data", "--memory", "0.9", "--time", "60s")
    code, said = call(*words, "--samples", "500", "--write-only")
    assert code == 0, said
    lines = {line.partition(":")[0]: line for line in said.splitlines()}
    assert list(lines) == [
        "machine", "int8", "memory", "table", "budget", "key", "file", "join with",
    ]  # fmt: skip
    assert "analytic: nothing was measured" in lines["table"]
    assert "time ≤ 60 s for 500 samples, memory ≤ 0.9" in lines["budget"]

    file = NodeFile.load(Path("pi/node.toml"))
    here = Path.cwd()
    assert file == NodeFile(
        "fl.example.org:8000",
        root_certificates=f"{here}/ca.crt",
        auth_supernode_private_key=f"{here}/pi/key",
        node_config={
            "trust": "task",
            "data-dir": f"{here}/data",
            "time": "60s",
            "memory": 0.9,
            "profile": f"{here}/table.json",
        },
    )
    assert file.words()[-1].startswith('trust="task" data-dir="')
    key = Path("pi/key").read_bytes()
    assert stat.S_IMODE(Path("pi/key").stat().st_mode) == 0o600
    assert Path("pi/key.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    assert call(*words, "--write-only")[0] == 0
    assert Path("pi/key").read_bytes() == key, "the server knows this one"


def test_paths_of_a_node_file_are_relative_to_it(tmp_path: Path) -> None:
    text = 'superlink = "h:1"\nauth-supernode-private-key = "key"\n[node-config]\nmemory = 0.5\n'
    (tmp_path / "node.toml").write_text(text)
    file = NodeFile.load(tmp_path / "node.toml")
    assert file.words() == [
        "--superlink", "h:1", "--auth-supernode-private-key", str(tmp_path / "key"),
        "--node-config", "memory=0.5",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device", *OPEN, "--memory", "200MB"], "memory is '200MB', but what spans cost"),
        (["device", *OPEN, "--table", "table.json", "--time", "0"], "fits time ≤ 0"),
        (["device", *OPEN, "--table", "table.json", "--model", "resnet18"], "is a table of cnn"),
        (["device", *SECURE[:2], "--root-certificates", "x.crt"], "x.crt; copy ca.crt from"),
        (["device", "--insecure", "--superlink", "fl"], "expected the server's address, HOST:PORT"),
        (["device", "--insecure", "--superlink", "http://fl:80"], "is 'http://fl:80'; expected"),
        (["device", "--insecure", "--superlink", "fl:99999"], "is 'fl:99999'; expected"),
        (["device", *SECURE[:2], "--root-certificates", "table.json"], "holds no certificate"),
        (["device", *OPEN, "--data-dir", "dta"], "there is no folder dta; --data-dir is where"),
        (["device", *OPEN, "--time", "60"], "takes; give a unit (60s), a"),
        (["device", *OPEN, "--model", "cnn", "--memory", "2MX"], "cannot read memory = '2MX'"),
        (["device", "ca.crt", *OPEN], "choose another folder"),
        (["node", "--file", "table.json", "--insecure"], "give --file alone"),
        (["node", "--file", "none.toml"], "cannot read the node file none.toml"),
        (["node"], "no server is named"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(call, words, said) -> None:
    code, shown = call("flower", *words)
    assert code == 2
    assert said in shown
    assert not Path("device/node.toml").exists()


def test_what_is_mistyped_is_said_before_minutes_of_measuring(call) -> None:
    for words in (["--memory", "2MX"], ["--root-certificates", "ca.crt"]):
        code, shown = call("flower", "device", *OPEN, "--model", "cnn", *words)
        assert (code, shown.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ('superlink = "h:1"\nkey = "k"', InvalidExperiment, "unknown key"),
        ('superlink = "h:1"\ninsecure = true\nroot-certificates = "x"', InvalidSetting, "TLS"),
        ('superlink = "h:1"\n[node-config]\na = [1]', InvalidSetting, "expected a number"),
        ("superlink", InvalidSetting, "cannot read"),
    ],
)
def test_a_broken_node_file_is_refused(tmp_path: Path, text, error, said) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(error, match=said):
        NodeFile.load(tmp_path / "node.toml")


def test_unit_container_and_guide_use_options_that_exist() -> None:
    commands = typer.main.get_command(app).commands["flower"].commands
    known = {option for one in commands.values() for p in one.params for option in p.opts}
    seen = set()
    for name in ("deploy/device/cocofl-device.service", "deploy/device/Containerfile"):
        text = (ROOT / name).read_text()
        assert "/var/lib/cocofl/node.toml" in text
        assert "/opt/cocofl" in text
    for page in (
        "docs/guides/device.md",
        "docs/guides/deployment.md",
        "deploy/device/cocofl-device.service",
    ):
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for line in re.findall(r"cocofl flower (?:device|node) (.*)", text):
            seen |= set(re.findall(r"(?<![\w-])--[a-z-]+", line))
    assert {"--file", "--write-only", "--root-certificates"} <= seen
    assert seen <= known


def test_a_device_installs_flower_without_its_simulation() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (device,), (whole,) = (extras["optional-dependencies"][name] for name in ("device", "flower"))
    assert device == whole.replace("[simulation]", "")
