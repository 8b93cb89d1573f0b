"""Networks of Hugging Face's by name, for all tasks, from folders without code or pickles."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cocofl import Experiment, Run, simulate
from cocofl.data import UserData, load
from cocofl.data.samples import IGNORED
from cocofl.errors import CocoflError, InvalidData, InvalidExperiment, InvalidModel
from cocofl.experiment import model_with
from cocofl.experiment.setup import Setup
from cocofl.fl.metrics import metric
from cocofl.fl.training import STACKED_LOSSES, cross_entropy
from cocofl.flower.client import Device, _own_experiment
from cocofl.models.hugging_face import hugging_face
from tests.hugging_face import ALL, transformers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NUMBERS = np.random.default_rng(0)
WORDS = ["good", "bad", "fine", "poor"]


def sentences(_folder: Path | None) -> UserData:
    """Texts of different lengths, of two authors: the label is their first word."""
    texts = [f"{WORDS[i % 4]} film{' indeed' * (i % 2)}" for i in range(48)]
    rows = {"text": texts, "label": [text.split()[0] for text in texts], "owner": [0, 1] * 24}
    return UserData(rows, tokenizer=_letters, length=12)


def language(_folder: Path | None) -> UserData:
    """Texts without labels; the long ones take more than one window."""
    texts = ["a good film of the sea" * (1 + i % 2) for i in range(24)]
    rows = {"text": texts, "owner": [i % 2 for i in range(24)]}
    return UserData(rows, kind="next_token", tokenizer=_letters, length=12)


def tags(_folder: Path | None) -> Any:
    """Of each letter one of three tags; of padding none."""
    ids = NUMBERS.integers(1, 9, (48, 7))
    ids[::3, 4:] = 0
    return ids, np.where(ids == 0, IGNORED, ids % 3)


def images(_folder: Path | None) -> Any:
    pixels = NUMBERS.integers(0, 256, (24, 32, 32, 3), np.uint8)
    return pixels, np.arange(24) % 3


def sounds(_folder: Path | None) -> Any:
    return NUMBERS.normal(size=(24, 1, 400)), np.arange(24) % 3


def _letters(texts: Any) -> list[list[int]]:
    return [[1 + ord(letter) % 40 for letter in text] for text in texts]


def folder(place: Path, name: str, **options: Any) -> Path:
    """A model's folder as `save_pretrained` leaves it, with random weights."""
    _, config_name, known, *_ = ALL[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**(known | options))
    getattr(transformers, ALL[name][0])(config).save_pretrained(place / name)
    return place / name


def experiment(model: Path, data: str, **changes: Any) -> Experiment:
    return Experiment.parse(
        {
            "rounds": 1,
            "model": {"name": f"hf:{model}"},
            "data": {"name": f"{__name__}:{data}", "split": "iid"},
            "devices": {"count": 3, "per_round": 3},
            "training": {"batch": 8, "lr": 0.05},
            "engine": {"kernels": "reference", "kind": "serial", "workers": 1},
        }
    ).changed(changes)


def test_a_language_model_learns_from_texts_alone(tmp_path: Path) -> None:
    tried = experiment(
        folder(tmp_path, "gpt2", n_layer=1),
        "language",
        **{"evaluation.metrics": ["perplexity", "token_accuracy"], "evaluation.every": 1},
        **{"rounds": 2, "training.optimizer": "adam", "training.lr": 0.01},
    )
    setup = Setup(tried)
    assert dict(setup.subject.options)["task"] == "causal-lm"
    assert len(setup.chain) == 4
    # What was in the folder is where the devices begin.
    kept = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").state_dict()
    begun = setup.subject.build(seed=7)[0].state_dict()
    key = "transformer.h.0.mlp.c_fc.weight"
    assert torch.equal(begun[f"network.{key}"], kept[key])

    run = simulate(tried, out=tmp_path / "run")
    first, last = [record.scores["perplexity"] for record in run.rounds]
    assert last < first < 60
    assert run.folder.about["metrics"]["perplexity"]["higher_is_better"] is False
    # The result is an ordinary model again.
    found = model_with(Run.open(tmp_path / "run"))
    found.network.save_pretrained(tmp_path / "tuned")  # type: ignore[operator, union-attr]
    tuned = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tuned").eval()
    ids = torch.tensor([[5, 6, 7]])
    assert torch.allclose(tuned(ids).logits, found(ids))


@pytest.mark.parametrize(
    ("model", "data", "task", "classes"),
    [
        pytest.param("bert", "sentences", "sequence-classification", 4, marks=pytest.mark.slow),
        pytest.param("distilbert", "tags", "token-classification", 3, marks=pytest.mark.slow),
        pytest.param("gpt2", "sentences", "sequence-classification", 4, marks=pytest.mark.slow),
        pytest.param("vit", "images", "image-classification", 3, marks=pytest.mark.slow),
        pytest.param("wav2vec2", "sounds", "audio-classification", 3, marks=pytest.mark.slow),
    ],
)
def test_a_new_head_is_made_for_the_task(
    model: str, data: str, task: str, classes: int, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tried = experiment(folder(tmp_path, model), data)
    if task == "token-classification":
        tried = tried.changed({"evaluation.metrics": ["token_accuracy"]})
    with caplog.at_level(logging.INFO, "cocofl.models"):
        setup = Setup(tried)
    assert dict(setup.subject.options)["task"] == task
    assert "new, and not pretrained" in caplog.text
    inputs, _ = setup.trainer.spec.train.batch(np.arange(2))
    if setup.data.facts.task != "image":
        outputs = setup.trainer.model().eval()(torch.from_numpy(inputs))
        assert outputs.shape[-1] == classes
    run = simulate(tried, out=tmp_path / "run")
    assert 0 <= next(iter(run.final.scores.values())) <= 1


def test_padding_changes_nothing(tmp_path: Path) -> None:
    network = hugging_face(
        f"hf:{folder(tmp_path, 'bert')}", 3, task="sequence-classification", shape=[9], pad_id=0
    ).eval()
    short = torch.tensor([[5, 6, 7, 8]])
    long = torch.tensor([[5, 6, 7, 8, 0, 0, 0, 0]])
    assert torch.allclose(network(short), network(long), atol=1e-6)
    assert network.example_input(3).shape == (3, 9)
    assert (network.example_input(3)[1] == 0).any()


def test_only_configurations_and_safetensors_are_read(tmp_path: Path) -> None:
    place = folder(tmp_path, "gpt2")
    weights = place / "model.safetensors"
    torch.save({"weight": torch.zeros(2)}, place / "pytorch_model.bin")
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidModel, match=r"pickled weights, is not read"):
        hugging_face(f"hf:{place}", task="causal-lm")
    # A configuration is enough where weights are fresh.
    fresh = hugging_face(f"hf:{place}", task="causal-lm", init="random")
    assert fresh(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 50)

    code = {"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}}
    (place / "config.json").write_text(json.dumps(code))
    (place / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InvalidModel, match="it brings code of its own, which is never run"):
        hugging_face(f"hf:{place}", task="causal-lm", init="random")
    assert not (tmp_path / "ran").exists()


def test_wrong_names_and_tasks_say_what_to_do(tmp_path: Path) -> None:
    place = folder(tmp_path, "gpt2")
    with pytest.raises(InvalidModel, match="neither a folder here nor a name on the Hub"):
        hugging_face("hf:./nowhere")
    with pytest.raises(InvalidModel, match=r"did you mean causal-lm"):
        hugging_face(f"hf:{place}", task="causal_lm")
    with pytest.raises(InvalidModel, match=r"the data has 60 tokens, but the model .* knows 50"):
        hugging_face(f"hf:{place}", task="causal-lm", vocab_size=60)
    with pytest.raises(InvalidExperiment, match=r"resnet18 has no weights of its own"):
        Setup(Experiment().changed({"model": {"name": "resnet18", "init": "pretrained"}}))


def test_what_a_model_cannot_do_is_said_with_the_way_out(tmp_path: Path) -> None:
    bert, gpt2 = folder(tmp_path, "bert"), folder(tmp_path, "gpt2")
    # What it is to tell it would see.
    for init in ("pretrained", "random"):
        with pytest.raises(InvalidModel, match=r"no language model for causal-lm: .* that follow"):
            hugging_face(f"hf:{bert}", task="causal-lm", init=init, shape=[7])
    config = json.loads((bert / "config.json").read_text())
    (bert / "config.json").write_text(json.dumps(config | {"is_decoder": True}))
    assert hugging_face(f"hf:{bert}", task="causal-lm", shape=[7])._input_name == "input_ids"
    for place, task in ((gpt2, "causal-lm"), (bert, "sequence-classification")):
        with pytest.raises(
            InvalidModel, match=r"have 21 tokens, .* 20 positions; say a smaller length"
        ):
            hugging_face(f"hf:{place}", task=task, shape=[21])
    with pytest.raises(InvalidModel, match=r"no network of its kind for this task"):
        hugging_face(f"hf:{gpt2}", task="image-classification")
    with pytest.raises(InvalidModel, match=r"t5 has .* a decoder, .* take an encoder like BERT"):
        hugging_face(f"hf:{folder(tmp_path, 't5')}", init="random")
    with pytest.raises(InvalidModel, match="the model hf: is neither a folder here nor a name"):
        hugging_face("hf:")


def test_a_folder_is_relative_to_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    file = tmp_path / "mine.toml"
    file.write_text('[model]\nname = "hf:tiny"\n')
    found = Experiment.load(file)
    assert found.model.name == f"hf:{tmp_path / 'tiny'}"
    assert found.model.title == found.without_places().model.name == "hf:tiny"
    assert found.names() == []  # nothing is imported
    file.write_text('[model]\nname = "hf:org/other"\n')
    assert Experiment.load(file).model.name == "hf:org/other"


def test_a_device_has_its_own_folder_and_downloads_nothing_unasked(tmp_path: Path) -> None:
    folder(tmp_path / "server", "gpt2")
    settings = {"model": {"name": f"hf:{tmp_path}/server/gpt2"}, "data": {"name": "own.csv"}}
    settings["data"]["options"] = {"kind": "next_token", "tokenizer": "bytes"}  # type: ignore[assignment]
    own = tmp_path / "device"
    own.mkdir()
    (own / "own.csv").write_text("text\nhallo\nwelt\n")
    told = {"experiment": settings, "facts": {"class_names": ["x"], "mean": [], "std": []}}
    with pytest.raises(InvalidExperiment, match=r"model hf:gpt2, .* put the folder 'gpt2' into"):
        Device({"data-dir": str(own)}, 1, told)
    folder(own, "gpt2")  # which knows 50 tokens; that of bytes are 257
    told["facts"]["class_names"] = [str(i) for i in range(257)]  # type: ignore[index]
    with pytest.raises(CocoflError, match=r"the model hf:.*device/gpt2 knows 50"):
        Device({"data-dir": str(own)}, 1, told)


def test_a_device_reads_data_of_the_hub_only_if_it_says_so(tmp_path: Path) -> None:
    server = Experiment().changed({"data.name": "hf:org/letters:german"})
    with pytest.raises(InvalidExperiment, match=r"the data set hf:letters, .* trust = 'hf'"):
        _own_experiment(server, {"data-dir": str(tmp_path)})
    there = _own_experiment(server, {"trust": "hf"})
    assert there.data.name == "hf:org/letters:german"
    (tmp_path / "letters").mkdir()
    here = _own_experiment(server, {"data-dir": str(tmp_path)})
    assert here.data.name == f"hf:{tmp_path}/letters:german"
    hostile = Experiment().changed({"data.name": "hf:/etc/secrets"})
    with pytest.raises(InvalidExperiment, match="neither a folder here nor a name on the Hub"):
        _own_experiment(hostile, {"trust": "hf"})


def test_texts_become_windows_of_the_next_token(tmp_path: Path) -> None:
    rows = {"train": ["abcde", "xy", "z"], "test": ["ab"]}
    data = load(UserData(rows, kind="next_token", tokenizer="bytes", length=3))
    a = ord("a") + 1
    assert data.train.inputs.tolist() == [[a, a + 1, a + 2], [a + 3, a + 4, 0], [a + 23, a + 24, 0]]
    assert data.train.labels.tolist()[1] == [a + 4, IGNORED, IGNORED]
    assert (data.facts.labels, data.facts.num_classes, data.facts.vocab_size) == (
        "tokens",
        257,
        257,
    )
    with pytest.raises(InvalidData, match="the inputs are no texts"):
        load(UserData(np.zeros((4, 3)).tolist(), kind="next_token"))
    with pytest.raises(InvalidData, match="no text has two tokens"):
        load(UserData({"train": ["abc"], "test": ["a"]}, kind="next_token", tokenizer="bytes"))


def test_what_is_ignored_neither_trains_nor_counts() -> None:
    labels = torch.tensor([[0, 1, IGNORED], [IGNORED, 2, IGNORED]])
    outputs = torch.log(torch.tensor([[0.5, 0.25, 0.25]])).expand(2, 3, 3)
    expected = (np.log(2) + 2 * np.log(4)) / 3
    assert float(cross_entropy(outputs, labels)) == pytest.approx(expected)
    stacked = STACKED_LOSSES["cross_entropy"](outputs[None], labels[None], torch.tensor([2]), None)
    assert float(stacked) == pytest.approx(expected)
    for name, value in (
        ("loss", expected),
        ("perplexity", np.exp(expected)),
        ("token_accuracy", 1 / 3),
        ("accuracy", 1 / 3),
    ):
        one = metric(name)
        assert one.value(one.sums(outputs, labels, 3).numpy()) == pytest.approx(value)
    with pytest.raises(InvalidData, match="sample 1 has no label but -100"):
        load(UserData((np.ones((4, 2), int), np.array([[1, 0]] + [[IGNORED] * 2] * 3), None),
                      kind="tokens", test=0.25))  # fmt: skip
