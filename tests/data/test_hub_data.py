"""``hf:NAME``: folders in the Hub's layout, of which features say what their columns are."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordPiece

from cocofl import data
from cocofl.data.given import UserData
from cocofl.data.hub_data import told_by_features
from cocofl.errors import DataNotFound, InvalidData

List, Names, Text = datasets.List, datasets.ClassLabel, datasets.Value("string")
BYTES = {"tokenizer": "bytes", "length": 6}
TWO = Names(num_classes=2)
CELL = {"bytes": datasets.Value("binary"), "path": Text}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COCOFL_DATA", raising=False)


def saved(folder: Path, rows: dict[str, Any], features: dict[str, Any], *files: str) -> str:
    """A data set as the Hub has it, and its name."""
    # Files in cells are given as they are: encoding sound would need another library.
    given = {
        name: CELL if isinstance(one, datasets.Audio) else one for name, one in features.items()
    }
    table = datasets.Dataset.from_dict(rows, features=datasets.Features(given))
    table = table.cast(datasets.Features(features))
    for file in files or ("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(str(folder / file))
    return f"hf:{folder}"


def wav(samples: int) -> dict[str, Any]:
    packed = io.BytesIO()
    with wave.open(packed, "wb") as file:
        file.setparams((1, 2, 8000, samples, "NONE", ""))
        file.writeframes(np.full(samples, 2**14, "<i2").tobytes())
    return {"bytes": packed.getvalue(), "path": None}


def test_texts_with_named_classes(tmp_path: Path) -> None:
    rows = {"sentence": ["good", "bad"] * 4, "label": [1, 0] * 4}
    name = saved(tmp_path / "set", rows, {"sentence": Text, "label": Names(names=["neg", "pos"])})
    found = data.load(name, options=BYTES)
    assert found.facts.class_names == ("neg", "pos")
    assert found.train.inputs.shape == (8, 6)
    assert len(found.test) == 8
    assert found.facts.pad_id == 0


def test_images(tmp_path: Path) -> None:
    pictures = [Image.fromarray(np.full((4, 4, 3), i * 20, np.uint8)) for i in range(6)]
    rows = {"picture": pictures, "what": [0, 1] * 3}
    found = data.load(saved(tmp_path / "set", rows, {"picture": datasets.Image(), "what": TWO}))
    assert found.facts.task == "image"
    assert found.train.inputs.shape == (6, 4, 4, 3)


def test_sound_is_cut_and_padded_to_seconds(tmp_path: Path) -> None:
    rows = {"audio": [wav(80), wav(120)] * 2, "label": [0, 1] * 2}
    name = saved(tmp_path / "set", rows, {"audio": datasets.Audio(decode=False), "label": TWO})
    options = {"normalise": False}
    assert data.load(name, options=options).train.inputs.shape == (4, 1, 120)
    found = data.load(name, options=options | {"seconds": 0.0125})
    assert found.train.inputs.shape == (4, 1, 100)
    assert found.train.inputs[0, 0, 79:81].tolist() == [0.5, 0.0]


def test_what_is_no_wave_is_refused(tmp_path: Path) -> None:
    rows = {"audio": [{"bytes": b"ID3 mp3", "path": None}] * 2, "label": [0, 1]}
    name = saved(tmp_path / "set", rows, {"audio": datasets.Audio(decode=False), "label": TWO})
    with pytest.raises(InvalidData, match="expected sound as WAV"):
        data.load(name)


def test_a_class_per_word_lands_on_its_first_token(tmp_path: Path) -> None:
    rows = {"tokens": [["Jo", "ran"], ["I"]] * 2, "ner": [[1, 0], [0]] * 2}
    features = {"tokens": List(Text), "ner": List(Names(names=["O", "PER"]))}
    found = data.load(saved(tmp_path / "set", rows, features), options=BYTES)
    assert found.facts.labels == "tokens"
    assert found.facts.pad_id == 0
    assert found.facts.class_names == ("O", "PER")
    none = [-100]
    assert found.train.labels[:2].tolist() == [[1, *none, 0, *none * 3], [0, *none * 5]]


def test_words_by_a_tokenizer_that_lies_beside_the_folder(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordPiece({"[UNK]": 0, "[PAD]": 1, "Jo": 2, "r": 3, "##an": 4}))
    tokenizer.save(str(tmp_path / "own.json"))
    rows = {"tokens": [["Jo", "ran"]] * 2, "ner": [[1, 0]] * 2}
    features = {"tokens": List(Text), "ner": List(Names(names=["O", "PER"]))}
    name = saved(tmp_path / "set", rows, features)
    found = data.load(name, options={"tokenizer": "own.json", "length": 4})
    assert found.train.inputs[0].tolist() == [2, 3, 4, 1]
    assert found.train.labels[0].tolist() == [1, 0, -100, -100]
    assert (found.facts.pad_id, found.facts.vocab_size) == (1, 5)


def test_texts_alone(tmp_path: Path) -> None:
    name = saved(tmp_path / "set", {"story": ["to be or not"] * 4}, {"story": Text})
    found = data.load(name, options=BYTES | {"kind": "next_token"})
    assert found.facts.labels == "tokens"
    assert found.train.inputs.shape == (8, 6)


def test_several_labels_and_numbers(tmp_path: Path) -> None:
    rows = {"text": ["a", "b"] * 2, "topics": [[0, 2], [1]] * 2}
    features = {"text": Text, "topics": List(Names(names=["x", "y", "z"]))}
    found = data.load(saved(tmp_path / "topics", rows, features), options=BYTES)
    assert found.facts.labels == "multilabel"
    assert found.train.labels[0].tolist() == [1, 0, 1]
    rows = {"size": [1.0, 2.0], "age": [3.0, 4.0], "target": [5.5, 6.0]}
    found = data.load(
        saved(tmp_path / "prices", rows, dict.fromkeys(rows, datasets.Value("float32")))
    )
    assert found.facts.labels == "numbers"
    assert found.train.inputs.shape == (2, 2)


def test_the_validation_part_tests_where_the_test_part_has_no_labels(tmp_path: Path) -> None:
    features, folder = {"text": Text, "label": TWO}, tmp_path / "set"
    saved(folder, {"text": ["a", "b", "c"], "label": [0, 1, 0]}, features, "sst2/train.parquet")
    saved(folder, {"text": ["d"], "label": [-1]}, features, "sst2/test.parquet")
    name = saved(folder, {"text": ["e", "f"], "label": [1, 0]}, features, "sst2/validation.parquet")
    found = data.load(name, options=BYTES)
    assert (len(found.train), len(found.test)) == (3, 2)


def test_configurations_and_what_is_missing(tmp_path: Path) -> None:
    rows = {"text": ["a", "b", "c"], "label": [0, 1, 0]}
    files = ("one/train.parquet", "two/train/0000.parquet")
    name = saved(tmp_path / "set", rows, {"text": Text, "label": TWO}, *files)
    with pytest.raises(DataNotFound, match=r"several configurations; .* one, two"):
        data.load(name, options=BYTES)
    with pytest.raises(DataNotFound, match=r"no configuration '\.\.'; it has one, two"):
        data.load(f"{name}:..", options=BYTES)
    assert len(data.load(f"{name}:one", options=BYTES).train) == 2
    assert len(data.load(f"{name}:two", options=BYTES).train) == 2
    # Below the data folder, as data sets of the registry are.
    assert len(data.load("hf:set:one", data_dir=tmp_path, options=BYTES).test) == 1
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataNotFound, match=r"no file like train\.parquet"):
        data.load(f"hf:{tmp_path / 'bare'}")
    with pytest.raises(DataNotFound, match="neither a folder here nor a name on the Hub"):
        data.load("hf:../no/such/place")


def test_two_columns_that_could_be_labels_are_not_guessed() -> None:
    features = {"img": datasets.Image(), "fine": TWO, "rough": TWO}
    assert told_by_features(features, UserData(None)).labels == ()
    assert told_by_features(features, UserData(None, labels="fine")).inputs == "img"


def test_only_parquet_is_fetched_from_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    rows = {"text": ["a", "b"], "label": [0, 1]}
    saved(tmp_path / "fetched", rows, {"text": Text, "label": TWO}, "c/train.parquet")

    def download(name: str, **how: Any) -> str:
        asked.append((name, how["repo_type"], how["revision"], how["allow_patterns"]))
        return str(tmp_path / ("fetched" if how["revision"] else "nothing"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert len(data.load("hf:some/set:c", options=BYTES).train) == 1
    assert asked == [
        ("some/set", "dataset", revision, ["c/*.parquet"])
        for revision in (None, "refs/convert/parquet")
    ]
