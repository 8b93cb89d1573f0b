"""Data as people have it trains on both engines: series, tables, several labels, images, text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from cocofl import Experiment, simulate
from cocofl.data import UserData
from cocofl.engine.cohort import CohortExecutor
from cocofl.engine.executor import InProcess
from cocofl.errors import CocoflError

N, N_TEST = 160, 40


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(N, *shape)).astype(np.float32)


def series(_folder: Path | None) -> Any:
    """Three channels in units of their own; text says which of them moves; people own them."""
    codes = np.arange(N) % 3
    values = _noise(3, 16) * 0.3
    values[np.arange(N), codes] += 2 * np.sin(np.arange(16))
    values = values * [[1.0], [50.0], [0.01]] + [[9.81], [101325.0], [-3.0]]
    labels = np.array(["walk", "run", "sit"])[codes]
    people = [f"person {row % 4}" for row in range(N)]
    cut = N - N_TEST
    return {
        "train": (values[:cut], labels[:cut], people[:cut]),
        "test": (values[cut:], labels[cut:]),
    }


def table(folder: Path | None) -> Any:
    """A CSV file with a number to predict."""
    assert folder is not None
    values = _noise(4) * [1, 10, 100, 1] + [0, 5, 1000, 0]
    target = 2 * values[:, 0] + values[:, 1] / 10 + 20
    rows = [f"{a},{b},{c},{d},{y:.4f}" for (a, b, c, d), y in zip(values, target, strict=True)]
    (folder / "readings.csv").write_text("\n".join(["a,b,c,d,power", *rows]))
    return UserData(folder / "readings.csv", labels="power")


def several(_folder: Path | None) -> Any:
    """Of each sample any of three labels."""
    values = _noise(6)
    return {"train": (values, values[:, :3] > 0.2), "test": (values[:40], values[:40, :3] > 0.2)}


def folder_of_images(folder: Path | None) -> Any:
    """Bright and dark pictures of different sizes."""
    assert folder is not None
    rng = np.random.default_rng(0)
    for row in range(80):
        name = ("dark", "light")[row % 2]
        pixels = rng.integers(0, 120, (10 + row % 3, 12, 3)) + 120 * (row % 2)
        place = folder / "photos" / ("train" if row < 60 else "test") / name
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{row}.png")
    return UserData(folder / "photos", size=8)


def hugging_face(_folder: Path | None) -> Any:
    """Texts, their classes and their authors."""
    rng = np.random.default_rng(0)
    words = (["good", "fine", "great"], ["bad", "poor", "awful"])
    texts = [" ".join(rng.choice(words[row % 2], 4)) for row in range(N)]
    rows = {
        "text": texts,
        "label": ["pos", "neg"] * (N // 2),
        "author": [row % 5 for row in range(N)],
    }
    table = datasets.Dataset.from_dict(rows).class_encode_column("label")
    return UserData(table, owners="author", tokenizer="bytes", length=16)


def torch_data(_folder: Path | None) -> Any:
    """A PyTorch data set of float images with five channels."""
    values = torch.from_numpy(_noise(5, 6, 6))
    labels = (values.mean((1, 2, 3)) > 0).long()
    own = torch.utils.data.TensorDataset(values + labels.view(-1, 1, 1, 1), labels)
    return {"train": own, "test": torch.utils.data.Subset(own, range(40))}


def conv1d(num_classes: int) -> Any:
    body = [nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU()]
    head = [nn.Conv1d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()]
    return nn.Sequential(*body, *head, nn.Linear(8, num_classes)), torch.zeros(2, 3, 16)


def dense(num_classes: int, inputs: int = 4) -> Any:
    layers = [nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, num_classes)), torch.zeros(2, inputs)


def pixels(num_classes: int, channels: int = 3, side: int = 8) -> Any:
    body = [nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)]
    return nn.Sequential(*body, *head), torch.zeros(2, channels, side, side)


def grey(num_classes: int) -> Any:
    return pixels(num_classes, channels=1, side=9)


def reader(num_classes: int) -> Any:
    body = [nn.Embedding(257, 16), nn.Flatten(), nn.Linear(256, 16), nn.ReLU()]
    return nn.Sequential(*body, nn.Linear(16, num_classes)), torch.zeros(2, 16, dtype=torch.long)


def experiment(data: str, model: str, changes: dict[str, Any]) -> Experiment:
    return Experiment.parse(
        {
            "rounds": 10,
            "model": {"name": f"{__name__}:{model}"},
            "data": {"name": f"{__name__}:{data}", "split": "iid"},
            "devices": {"count": 4, "per_round": 4},
            "training": {"lr": 0.1, "batch": 10, "epochs": 2},
            "evaluation": {"every": 10},
            "tables": {"spans": "analytic"},
            "engine": {"kernels": "reference"},
        }
    ).changed(changes)


NATURAL = {"data.split": "natural"}
NUMBERS = {
    "training.loss": "squared_error",
    "training.lr": 0.02,
    "evaluation.metrics": ["rmse", "mae", "r2"],
}
SIX = {"model.options": {"inputs": 6}}
SEVERAL = {
    **SIX,
    "training.loss": "binary_cross_entropy",
    "training.lr": 0.5,
    "training.epochs": 5,
    "evaluation.metrics": ["label_f1", "label_accuracy"],
}
FIVE = {"model.options": {"channels": 5, "side": 6}}
KINDS: dict[str, tuple[str, dict[str, Any], str, Callable[[float], bool]]] = {
    "series": ("conv1d", NATURAL, "accuracy", lambda found: found > 0.9),
    "table": ("dense", NUMBERS, "r2", lambda found: found > 0.8),
    "several": ("dense", SEVERAL, "label_f1", lambda found: found > 0.8),
    "folder_of_images": ("pixels", {}, "accuracy", lambda found: found > 0.9),
    "hugging_face": ("reader", NATURAL, "accuracy", lambda found: found > 0.9),
    "torch_data": ("pixels", FIVE, "accuracy", lambda found: found > 0.9),
}


@pytest.mark.parametrize("data", KINDS)
def test_each_kind_of_data_is_learned_alike_by_both_engines(data: str, tmp_path: Path) -> None:
    model, changes, metric, is_learned = KINDS[data]
    own = experiment(data, model, {"data.dir": str(tmp_path), **changes})
    serial = simulate(own, out=tmp_path / "serial", executor=InProcess())
    cohort = simulate(
        own, out=tmp_path / "cohort", executor=CohortExecutor("cpu", precision="fp32")
    )
    score = serial.final.scores[metric]
    assert is_learned(score)
    assert cohort.final.scores[metric] == pytest.approx(score, abs=0.03)


def test_some_devices_had_frozen_parts_and_several_labels_have_groups(tmp_path: Path) -> None:
    model, changes, _, _ = KINDS["several"]
    own = experiment("several", model, {**changes, "rounds": 1})
    done = simulate(own, out=tmp_path / "run", executor=InProcess())
    spans = {one.work for one in done.rounds[0].devices}
    assert spans - {"0:3"}
    assert set(done.final.scores["group_label_f1"]) == {"strong", "medium", "weak"}
    assert done.folder.about["class_names"] == ["0", "1", "2"]


def ten_scores() -> Any:
    return dense(10)


def no_scores(num_classes: int) -> Any:
    net, example = conv1d(num_classes)
    return net[:-3], example


def pairs(num_classes: int) -> Any:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = dense(num_classes)[0]

        def forward(self, x: torch.Tensor) -> Any:
            scores = self.net(x)
            return scores, scores + 1

    return Pair(), torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("data", "model", "changes", "complaint"),
    [
        ("table", "ten_scores", {}, r"returns 10 numbers .* are numbers \(1\): expected 1 number"),
        ("series", "no_scores", {}, r"returns 8×16 numbers .* one of 3 classes: expected 3 num"),
        ("table", "pairs", {}, "returns a tuple, and training.loss = 'squared_error' reads a tens"),
        ("several", "dense", {}, "takes samples of 4, but .* has 6"),
        ("series", "pixels", {}, "takes samples of 3×8×8, but .* has 3×16"),
        ("folder_of_images", "dense", {}, "takes images of 4 .* has 3×8×8"),
        (
            "folder_of_images",
            "grey",
            {},
            r"has 3×8×8; say size = .9, 9., channels = 1 in .data.options. .or of UserData., where",
        ),
        ("hugging_face", "dense", {}, "takes torch.float32 of 4, but .* has token ids"),
        ("torch_data", "reader", {}, "takes torch.int64 samples of 16, but .* has 5×6×6"),
        ("several", "dense", SIX | {"training.loss": "squared_error"}, "of .* are multilabel"),
        ("series", "conv1d", {"evaluation.metrics": ["rmse"]}, "rmse, which reads numbers"),
        ("several", "dense", SIX | {"data.split": "rc"}, "goes by the class .* has multilabel"),
        ("table", "dense", {"data.split": "natural"}, "name the column .owners."),
        ("table", "dense", {"data.options": {"x": 1}}, "and data.options"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    data: str, model: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    _, usual, _, _ = KINDS[data]
    settings = {key: value for key, value in usual.items() if key != "model.options"}
    own = experiment(data, model, {"data.dir": str(tmp_path), **settings, **changes})
    with pytest.raises(CocoflError, match=complaint) as found:
        simulate(own, out=tmp_path / "run")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_a_path_in_an_experiment_is_relative_to_its_file(tmp_path: Path) -> None:
    table(tmp_path)
    (tmp_path / "mine.toml").write_text(
        '[data]\nname = "readings.csv"\noptions = {labels = "power"}\n'
    )
    own = Experiment.load(tmp_path / "mine.toml")
    assert own.data.name == str(tmp_path / "readings.csv")
    assert own.data.title == "readings.csv"
    assert own.without_places().data.name == "readings.csv"
    assert not own.names()
    changed = own.changed({"data.options.labels": "a"})
    assert (own.data.options["labels"], changed.data.options["labels"]) == ("power", "a")


def test_the_example_of_a_sensor_learns_from_people_who_are_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    settings = {
        "model.name": "sensor_windows:network",
        "data": {"name": "sensor_windows:windows", "split": "natural"},
        "data.options": {"people": 8, "each": 20},
        "devices": {"count": 6, "per_round": 4},
        "training": {"batch": 10},
        "engine": {"kernels": "reference"},
    }
    own = Experiment(rounds=2).changed(settings)
    done = simulate(own, out=tmp_path / "run", executor=CohortExecutor("cpu", precision="fp32"))
    assert done.folder.about["class_names"] == ["lying", "stairs", "standing", "walking"]
    assert done.rounds[-1].loss < done.rounds[0].loss
