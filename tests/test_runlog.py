from __future__ import annotations

import errno
import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cocofl.errors import InvalidState, RunFolderProblem
from cocofl.files import write_text
from cocofl.runlog import (
    DeviceFigures,
    DeviceRecord,
    RoundRecord,
    RunFolder,
    only_writer,
    read_state,
)
from tests.states import same_state


def record(number: int, **more: Any) -> RoundRecord:
    devices = [DeviceRecord(3, "weak", "0:2", "merged"), DeviceRecord(5, "", None, "infeasible")]
    return RoundRecord(number, 0.1, 0.25, 1000, 1.5, devices, **more)


def folder(tmp_path: Path, rounds: int) -> RunFolder:
    made = RunFolder.create(tmp_path / "run", "rounds = 3\n")
    for index in range(rounds):
        made.append(record(index + 1), {"train_s": 0.1, "evaluate_s": 0.0})
    return made


def test_a_checkpoint_comes_back_and_cuts_off_what_was_logged_after_it(tmp_path: Path) -> None:
    run = folder(tmp_path, 2)
    state = {"w": torch.tensor([1.5, -0.0]), "scale": torch.tensor(0.1)}
    run.save_checkpoint(2, state)
    run.append(record(3), {"train_s": 0.1, "evaluate_s": 0.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4')  # killed while writing
    found = run.rewind()
    assert found is not None
    rounds, again = found
    assert rounds == 2
    assert same_state(again, state)
    assert run.rounds() == [record(1), record(2)]
    assert len(run.timing()) == 2


def test_without_a_checkpoint_everything_begins_anew(tmp_path: Path) -> None:
    run = folder(tmp_path, 2)
    assert run.rewind() is None
    assert run.rounds() == []


def test_a_log_that_lacks_rounds_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    run.save_checkpoint(2, {"w": torch.zeros(1)})
    with pytest.raises(RunFolderProblem, match="checkpoint beside it is of round 2"):
        run.rewind()


def test_a_record_is_the_same_after_it_was_written_and_read(tmp_path: Path) -> None:
    made = RunFolder.create(tmp_path / "run", "")
    scores = {"accuracy": 0.5, "perplexity": float("inf"), "class_accuracy": [0.5, 0.25]}
    tested = {"scores": scores, "other_scores": {"batch": {**scores, "group_accuracy": {"a": 1}}}}
    network = {
        "bytes_broadcast": 7,
        "reasons": [(2**64 - 1, "values: not finite")],
        "figures": [DeviceFigures(3, 20, 1.5, 0.25, 1.0, 2.0, False)],
        "quarantined": [2**64 - 2],
    }
    written = [record(1), record(2, **tested), record(3, **tested, **network)]
    for one in written:
        made.append(one, {"train_s": 0.1, "evaluate_s": 0.0})
    assert made.rounds() == written
    assert (written[0].count("merged"), written[0].count("lost")) == (1, 0)
    line = json.loads((made.path / "metrics.jsonl").read_text().splitlines()[2])
    assert list(line) == [
        *("round", "lr", "simulated_s", "bytes_up", "bytes_broadcast", "loss"),
        *("merged", "late", "lost", "rejected", "infeasible", "devices", "reasons"),
        *("figures", "quarantined"),
        *("accuracy", "perplexity", "class_accuracy", "batch_statistics"),
    ]


GOOD = record(2, scores={"accuracy": 0.5}).to_json()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({k: v for k, v in GOOD.items() if k != "lr"}, "lacks 'lr'"),
        ({**GOOD, "loss": float("nan")}, "'loss' is nan"),
        ({**GOOD, "lr": "fast"}, "'lr' is 'fast'"),
        ({**GOOD, "bytes_up": True}, "'bytes_up' is True"),
        ({**GOOD, "bytes_up": 10**400}, "'bytes_up' is 1000"),
        ({**GOOD, "simulated_s": 10**400}, "'simulated_s' is 1000"),
        ({**GOOD, "merged": -1}, "'merged' is -1"),
        ({**GOOD, "devices": [[3, "weak", "0:2"]]}, "'devices' is a list"),
        ({**GOOD, "devices": [[3, "weak", "0:2", "happy"]]}, "'devices' is a list"),
        ({**GOOD, "devices": [[3, "weak", "0:2", ["merged"]]]}, "'devices' is a list"),
        ({**GOOD, "reasons": [[3]]}, "'reasons' is a list"),
        ({**GOOD, "figures": [[3, 20, 1.5, 0.25, 1.0, 2.0, 1]]}, "'figures' is a list"),
        ({**GOOD, "figures": [[3, 20, 1.5, float("nan"), 1.0, 2.0, True]]}, "'figures' is a list"),
        ({**GOOD, "quarantined": [-1]}, "'quarantined' is a list"),
        ({**GOOD, "accuracy": "good"}, "is not numbers"),
        ({**GOOD, "accuracy": 10**400}, "is not numbers"),
        ({**GOOD, "group_accuracy": {"weak": {"all": 1}}}, "is not numbers"),
        ({**GOOD, "batch_statistics": 3}, "is not numbers"),
        ({**GOOD, "round": 4}, "is of round 4"),
        ({**GOOD, "f1": 0.5}, "other metrics than the lines before"),
        ([], "is a list, not a table"),
        ("[" * 100_000, "damaged"),
        ("1" * 5000, "damaged"),
        ("\xff", "damaged"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: Any, message: str) -> None:
    made = RunFolder.create(tmp_path / "run", "")
    made.append(record(1, scores={"accuracy": 0.5}), {"train_s": 0.1, "evaluate_s": 0.0})
    text = line if isinstance(line, str) else json.dumps(line)
    with (made.path / "metrics.jsonl").open("ab") as file:
        file.write(text.encode("latin-1") + b"\n")
    with pytest.raises(RunFolderProblem, match=re.escape(message)) as problem:
        made.rounds()
    assert f"{made.path / 'metrics.jsonl'}, line 2" in str(problem.value)


def about(machine: str, commit: str = "abc") -> dict[str, str]:
    return {"hardware": machine, "commit": commit, "command": "cocofl run"}


def test_a_run_that_goes_on_elsewhere_tells_of_both_places(tmp_path: Path) -> None:
    run = folder(tmp_path, 3)
    run.write_about(about("a GPU"))
    assert run.origin("hardware") == "a GPU"
    for rounds, machine in ((1, "a Pi"), (1, "a phone"), (2, "a phone"), (3, "a phone")):
        run.save_checkpoint(rounds, {"w": torch.zeros(1)})
        run.write_about(about(machine))
    assert run.origin("hardware") == "a GPU to round 1, then a phone"  # the Pi finished no round
    assert run.origin("commit") == "abc"
    run.write_about(about("a phone", "def"))
    assert run.origin("hardware") == "a GPU to round 1, then a phone"
    assert run.origin("commit") == "abc to round 3, then def"
    assert run.origin("python") == ""


def test_what_was_lost_is_not_told_of(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    run.write_about(about("a GPU"))
    run.write_about(about("a Pi"))  # without a checkpoint
    assert run.origin("hardware") == "a Pi"


@pytest.mark.parametrize("before", ["nothing", {"rounds": 1}, [1], [{"rounds": "1"}], [{}]])
def test_parts_that_cannot_be_are_refused(before: object, tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    run.save_checkpoint(1, {"w": torch.zeros(1)})
    write_text(run.path / "about.json", json.dumps({"before": before}))
    with pytest.raises(RunFolderProblem, match=r"about\.json is damaged"):
        run.origin("commit")
    with pytest.raises(RunFolderProblem, match=r"about\.json is damaged"):
        run.write_about(about("a Pi"))


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    with pytest.raises(RunFolderProblem, match="exists already; continue it with --resume"):
        RunFolder.create(run.path, "")
    assert run.experiment == "rounds = 3\n"
    with pytest.raises(RunFolderProblem, match="is not a run folder"):
        RunFolder.open(tmp_path)


def test_what_is_no_run_cannot_be_continued(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    for path in (tmp_path, tmp_path / "notes"):
        with pytest.raises(RunFolderProblem, match="exists already; name another with --out"):
            RunFolder.create(path, "rounds = 3\n")


WRITER = """
import sys
from pathlib import Path
from typing import Any
from cocofl.runlog import only_writer
with only_writer(Path(sys.argv[1])):
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_writer_until_that_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "one"
    pipe, words = subprocess.PIPE, [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with (
            pytest.raises(RunFolderProblem, match=f"another process is .* {path}; "),
            only_writer(path),
        ):
            pytest.fail("two write at once")
        process.kill()
    with only_writer(path):
        assert list(path.iterdir()) == []


def test_where_folders_cannot_be_locked_runs_are_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", cannot)
    with only_writer(tmp_path), only_writer(tmp_path):
        pass


def test_a_disk_that_takes_no_more_says_so(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    (run.path / "metrics.jsonl").unlink()
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderProblem, match=r"No space left.*--resume"):
        run.append(record(2), {})


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 64, b"{}", b"\x08\0\0\0\0\0\0\0{}      "]
)
def test_a_state_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(content)
    if content.endswith(b"{}      "):
        assert read_state(path) == (0, {})  # an empty but sound file
        return
    with pytest.raises(InvalidState, match="cannot read"):
        read_state(path)


def test_what_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    with pytest.raises(IsADirectoryError):
        write_text(tmp_path / "page", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_model_ends_the_run(tmp_path: Path) -> None:
    run = folder(tmp_path, 1)
    with pytest.raises(RunFolderProblem, match="no model yet"):
        run.model()
    run.save_checkpoint(1, {"w": torch.zeros(1)})
    assert not run.is_complete
    run.save_model({"w": torch.ones(1)}, 1)
    assert run.is_complete
    assert run.model()["w"].item() == 1.0
    assert not (run.path / "checkpoint.safetensors").exists()
