"""Loading: every format the data sets are published in, the cache, and what users get wrong."""

from __future__ import annotations

import io
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from data_files import pixels, png, write_cifar10, write_parquet
from PIL import Image

from cocofl import data
from cocofl.data import images, language, vision
from cocofl.data.origin import Origin
from cocofl.data.registry import cache_paths
from cocofl.errors import CocoflError, DataNotFound, InvalidData
from cocofl.named import import_ours

# --- every format --------------------------------------------------------------------------------


def test_digits_work_at_once():
    digits = data.load()
    assert digits.name == "digits"
    assert digits.train.inputs.shape == (1438, 8, 8, 1)
    assert len(digits.test) == 359
    assert digits.facts.class_names == tuple("0123456789")
    assert digits.train.inputs.max() == 255
    assert digits.test.facts.mean == digits.train.facts.mean


def test_cifar10_from_the_hubs_layout(root):
    write_cifar10(root)
    cifar = data.load("cifar10", data_dir=root)
    assert np.array_equal(cifar.train.inputs, pixels(40, 32, 32, 3))
    assert cifar.train.labels.tolist() == [*range(10)] * 4
    assert cifar.facts.class_names[3] == "cat"
    assert cifar.test.facts.mean == cifar.train.facts.mean


def test_cifar10_as_the_hub_serves_it(root, tmp_path, monkeypatch):
    # A folder stands in for the repository: the same call, without the network.
    write_cifar10(root)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))
    with vision.cifar10(Origin(None, str(root / "uoft-cs/cifar10")), "standard") as parts:
        (images,) = parts["test"].inputs
    assert np.array_equal(images, pixels(20, 32, 32, 3))
    assert parts["train"].labels.tolist() == [*range(10)] * 4


def test_names_in_the_file_win_over_ours(root):
    names = [f"name {label}" for label in range(100)]
    features = {"img": {"_type": "Image"}, "fine_label": {"names": names, "_type": "ClassLabel"}}
    for split in ("train", "test"):
        columns = {"img": pixels(5, 32, 32, 3), "fine_label": np.arange(5) * 20}
        write_parquet(root / f"uoft-cs/cifar100/cifar100/{split}-0.parquet", columns, features)
    cifar = data.load("cifar100", data_dir=root)
    assert cifar.facts.class_names[99] == "name 99"
    assert cifar.test.labels.tolist() == [0, 20, 40, 60, 80]


def test_shards_are_read_in_order(root):
    folder = root / "zalando-datasets/fashion_mnist/fashion_mnist"
    images = pixels(6, 28, 28)
    for shard in range(3):
        columns = {"image": images[shard * 2 :][:2], "label": np.array([shard, shard])}
        write_parquet(folder / f"train-{shard:05}-of-00003.parquet", columns)
    write_parquet(folder / "test.parquet", {"image": images, "label": np.zeros(6, int)})
    write_parquet(folder / "training-notes.parquet", {"text": ["not a split"]})
    fashion = data.load("fashion_mnist", data_dir=root)
    assert fashion.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert np.array_equal(fashion.train.inputs[..., 0], images)


def test_cinic10_as_folders_of_classes(root):
    image = pixels(3, 32, 32, 3)
    for split in ("train", "valid", "test"):
        for label, name in enumerate(vision.CIFAR10_NAMES):
            folder = root / "CINIC-10" / split / name
            folder.mkdir(parents=True)
            for number in range(1 + label % 2):
                (folder / f"cifar10-{split}-{number}.png").write_bytes(png(image[number]))
    (root / "CINIC-10" / "README.md").write_text("as in the archive")
    cinic = data.load("cinic10", data_dir=root)
    assert cinic.train.labels.tolist() == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8, 9, 9]
    assert np.array_equal(cinic.train.inputs[2], image[1])
    shutil.rmtree(root / "CINIC-10/train/truck")
    with pytest.raises(InvalidData, match="expected one per class: airplane"):
        data.load("cinic10", data_dir=root)


def test_cinic10_in_parquet(root):
    for split in ("train", "test"):
        columns = {"image": pixels(2, 32, 32, 3), "label": np.array([4, 9])}
        write_parquet(root / f"flwrlabs/cinic10/data/{split}-00000-of-00001.parquet", columns)
    assert data.load("cinic10", data_dir=root).train.labels.tolist() == [4, 9]


def write_femnist(root, n=50):
    names = list(vision.FEMNIST_NAMES)
    features = {
        "image": {"_type": "Image"},
        "writer_id": {"dtype": "string", "_type": "Value"},
        "hsf_id": {"dtype": "int64", "_type": "Value"},
        "character": {"names": names, "_type": "ClassLabel"},
    }
    columns = {
        "image": pixels(n, 28, 28),
        "writer_id": [f"f{sample % 5:04}_14" for sample in range(n)],
        "hsf_id": np.zeros(n, int),
        "character": np.arange(n) % 62,
    }
    write_parquet(root / "flwrlabs/femnist/data/train-00000-of-00001.parquet", columns, features)


def test_femnist_in_parquet_is_scaled_and_knows_its_writers(root):
    write_femnist(root)
    femnist = data.load("femnist", data_dir=root)
    assert femnist.train.inputs.shape == (40, 32, 32, 3)
    assert len(femnist.test) == 10
    assert femnist.facts.owner_kind == "writer"
    assert femnist.facts.owner_names == tuple(f"f{writer:04}_14" for writer in range(5))
    assert set(femnist.train.labels) | set(femnist.test.labels) == set(range(50))
    assert femnist.train.owners.tolist() == (femnist.train.labels % 5).tolist()
    first = Image.fromarray(pixels(50, 28, 28)[femnist.train.labels[0]])
    expected = np.asarray(first.resize((32, 32), Image.Resampling.BILINEAR))
    assert np.array_equal(femnist.train.inputs[0, ..., 2], expected)


def test_the_papers_femnist_needs_all_of_it(root):
    write_femnist(root)
    with pytest.raises(InvalidData, match=r"takes 640500 images, but .* has 49"):
        data.load("femnist", data_dir=root, preset="paper")


def write_leaf(root, split, users):
    folder = root / "femnist" / "data" / split
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(samples["y"]) for samples in users.values()],
        "user_data": users,
    }
    name = f"all_data_{len(list(folder.iterdir()))}_niid_0_keep_0_{split}_9.json"
    (folder / name).write_text(json.dumps(content))


def leaf_user(*labels):
    return {"x": [[1.0] * 783 + [label / 62] for label in labels], "y": list(labels)}


def test_femnist_in_leafs_json(root):
    write_leaf(root, "train", {"f0001_14": leaf_user(0, 61), "f0002_14": leaf_user(10)})
    write_leaf(root, "train", {"f0003_14": leaf_user(11)})
    write_leaf(root, "test", {"f0001_14": leaf_user(5)})
    femnist = data.load("femnist", data_dir=root)
    assert femnist.train.inputs.shape == (4, 32, 32, 3)
    assert femnist.train.labels.tolist() == [0, 61, 10, 11]
    assert femnist.train.owners.tolist() == [0, 0, 1, 2]
    assert femnist.train.facts.owner_names == ("f0001_14", "f0002_14", "f0003_14")
    assert femnist.train.inputs[0, 0, 0].tolist() == [255, 255, 255]
    assert femnist.train.inputs[0, 31, 31].tolist() == [0, 0, 0]
    assert len(femnist.test) == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "as JSON"),
        ("[]", "no LEAF file"),
        ('{"user_data": {}}', "no LEAF file"),
        ('{"user_data": {"u": {"x": [[1, 2]], "y": [0]}}}', "expected 1 images of 784 pixels"),
        ('{"user_data": {"u": {"y": [0]}}}', "expected lists x and y"),
        (json.dumps({"user_data": {"u": {"x": [[7] * 784], "y": [0]}}}), "between 0 and 1"),
        (json.dumps({"user_data": {"u": {"x": [[1] * 784], "y": [62]}}}), "has label 62"),
    ],
)
def test_leaf_files_that_are_none(root, content, complaint):
    write_leaf(root, "test", {"u": leaf_user(1)})
    write_leaf(root, "train", {"u": leaf_user(1)})
    next((root / "femnist/data/train").iterdir()).write_text(content)
    with pytest.raises(InvalidData, match=complaint):
        data.load("femnist", data_dir=root)


def test_chest_x_rays_in_parquet(root):
    for split in ("train", "test"):
        columns = {
            "image": pixels(3, 300, 280),
            "label": np.array([0, 1, 1]),
            "patient": np.array([7, 7, 12]),
            "finding": ["No Finding", "Mass", "Mass|Nodule"],
        }
        write_parquet(root / f"nih-chest-xray/{split}-00000-of-00001.parquet", columns)
    xchest = data.load("xchest", data_dir=root)
    assert xchest.train.inputs.shape == (3, 256, 256, 3)
    assert xchest.facts.class_names == ("no finding", "finding")
    assert xchest.train.owners.tolist() == [1, 1, 0]
    assert xchest.facts.owner_names == ("12", "7")
    with pytest.raises(InvalidData, match="takes 12700 images"):
        data.load("xchest", data_dir=root, preset="paper")


def test_chest_x_rays_as_nih_publishes_them(root):
    folder = root / "nih-chest-xray"
    rows = [("a.png", "No Finding", 1), ("b.png", "Mass|Nodule", 1), ("c.png", "Mass", 2)]
    for part, (name, _, _) in enumerate(rows):
        (folder / f"images_{part:03}/images").mkdir(parents=True)
        (folder / f"images_{part:03}/images" / name).write_bytes(png(pixels(1, 512, 512)[0]))
    lines = [f"{name},{finding},000,{patient},058Y,M" for name, finding, patient in rows]
    header = "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender"
    (folder / "Data_Entry_2017_v2020.csv").write_text("\n".join([header, *lines]))
    (folder / "train_val_list.txt").write_text("a.png\nb.png")
    (folder / "test_list.txt").write_text("c.png")
    xchest = data.load("xchest", data_dir=root)
    assert xchest.train.labels.tolist() == [0, 1]
    assert xchest.test.labels.tolist() == [1]
    assert xchest.train.inputs.shape == (2, 256, 256, 3)
    assert xchest.train.facts.owner_names == ("1",)
    (folder / "images_001/images/b.png").unlink()
    with pytest.raises(DataNotFound, match=r"lacks 1 of 2 images .* like b\.png"):
        data.load("xchest", data_dir=root)


def write_imdb(root, n=30):
    words = ["good", "bad", "film", "plot", "actor", "music", "long", "short", "great", "dull"]
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        texts = [" ".join(rng.choice(words, 5 + 3 * row)) for row in range(n)]
        columns = {"text": texts, "label": np.arange(n) % 2}
        path = root / f"stanfordnlp/imdb/plain_text/{split}-00000-of-00001.parquet"
        write_parquet(path, columns)


def test_imdb_is_cut_and_padded_by_a_tokenizer_of_its_own(root, monkeypatch):
    write_imdb(root)
    monkeypatch.setattr(language, "IMDB_VOCAB_SIZE", 60)
    monkeypatch.setattr(language, "IMDB_LENGTH", 20)
    imdb = data.load("imdb", data_dir=root)
    assert imdb.train.inputs.shape == (30, 20)
    assert imdb.facts.vocab_size == 60
    assert imdb.train.inputs.max() < 60
    assert imdb.train.inputs[0, -1] == imdb.facts.pad_id
    assert imdb.train.inputs[-1, -1] != imdb.facts.pad_id
    tokens = [int(token) for token in imdb.train.inputs[0] if token != imdb.facts.pad_id]
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=imdb.train.tokenizer)
    assert tokenizer.decode(tokens).split()[0].isalpha()
    assert imdb.test.tokenizer == imdb.train.tokenizer


def test_too_little_text_for_a_tokenizer(root):
    write_imdb(root)
    with pytest.raises(InvalidData, match="30 texts do not give a tokenizer of 16000 pieces"):
        data.load("imdb", data_dir=root)


def test_the_papers_imdb_is_pooled(root, monkeypatch):
    write_imdb(root)
    monkeypatch.setattr(language, "IMDB_VOCAB_SIZE", 60)
    with pytest.raises(InvalidData, match=r"takes 40000 reviews.* has 59"):
        data.load("imdb", data_dir=root, preset="paper")


def role(play, speaker, length):
    return {"play": play, "speaker": speaker, "text": (f"{play} {speaker}; " * length)[:length]}


def write_roles(root, roles):
    columns = {name: [role[name] for role in roles] for name in ("play", "speaker", "text")}
    write_parquet(root / "shakespeare/roles.parquet", columns)


def test_shakespeare_as_windows_that_know_their_play(root):
    roles = [role("lear", "FOOL", 500), role("ado", "HERO", 90), role("ado", "DON", 420)]
    write_roles(root, roles)
    plays = data.load("shakespeare", data_dir=root)
    # 500 characters: 400 train (320 windows of 80 and a label), 100 test (20 windows); 90: none;
    # 420: 336 train (256 windows), 84 test (4 windows).
    assert plays.train.inputs.shape == (320 + 256, 80)
    assert plays.test.inputs.shape == (20 + 4, 80)
    assert plays.facts.owner_names == ("ado", "lear")
    assert plays.train.owners.tolist() == [1] * 320 + [0] * 256
    alphabet = "".join(plays.facts.class_names)
    window = "".join(alphabet[code] for code in plays.train.inputs[7])
    assert window == roles[0]["text"][7:87]
    assert alphabet[plays.train.labels[7]] == roles[0]["text"][87]
    last = "".join(alphabet[code] for code in plays.test.inputs[-1])
    assert last + alphabet[plays.test.labels[-1]] == roles[2]["text"][-81:]


def test_the_papers_shakespeare_is_drawn_from_25_plays(root):
    write_roles(root, [role(f"play {n:02}", "A", 13_500 + 50 * n) for n in range(30)])
    plays = data.load("shakespeare", data_dir=root, preset="paper")
    assert len(plays.train) == 200_000
    assert len(plays.test) == 50_000
    assert plays.facts.owner_names == tuple(f"play {n:02}" for n in range(5, 30))
    assert set(plays.train.owners.tolist()) == set(range(25))


def test_the_papers_shakespeare_needs_25_plays(root):
    write_roles(root, [role("lear", "FOOL", 500)])
    with pytest.raises(InvalidData, match=r"takes 25 plays, but .* has 1"):
        data.load("shakespeare", data_dir=root, preset="paper")


def test_shakespeare_in_leafs_windows(root):
    lines = {
        "THE_TRAGEDY_OF_KING_LEAR_FOOL": role("lear", "FOOL", 450)["text"],
        "THE_TRAGEDY_OF_HAMLET_PRINCE_OF_DENMARK_GHOST": role("hamlet", "GHOST", 430)["text"],
    }
    rows = ["character_id,x,y"]
    for name, words in lines.items():
        for n in range(len(words) - 80):
            rows.append(f'{name},"{words[n : n + 80]}","{words[n + 80]}"')
    folder = root / "flwrlabs/shakespeare"
    folder.mkdir(parents=True)
    (folder / "shakespeare.csv").write_text("\n".join(rows))
    plays = data.load("shakespeare", data_dir=root)
    assert plays.facts.owner_names == ("hamlet", "king_lear")
    assert len(plays.train) == (360 - 80) + (344 - 80)
    del rows[100]
    (folder / "shakespeare.csv").write_text("\n".join(rows))
    with pytest.raises(InvalidData, match="do not follow each other"):
        data.load("shakespeare", data_dir=root)


# --- one's own -----------------------------------------------------------------------------------


def own_images(data_dir):
    images = pixels(6, 10, 12, 1)
    return {"train": (images[:4], [0, 1, 2, 1], ["x", "x", "y", "y"]), "test": (images[4:], [2, 0])}


def own_tokens(data_dir):
    tokens = np.arange(12).reshape(3, 4)
    return {"train": (tokens, [0, 1, 0]), "test": (tokens[:1], [1])}


def test_ones_own_function_needs_no_registration(tmp_path):
    own = data.load(f"{__name__}:own_images")
    assert own.train.inputs.shape == (4, 10, 12, 1)
    assert own.facts.num_classes == 3
    assert own.train.owners.tolist() == [0, 0, 1, 1]
    assert own.test.facts.mean == own.train.facts.mean
    tokens = data.load(f"{__name__}:own_tokens")
    assert tokens.facts.task == "text"
    assert tokens.facts.vocab_size == 12


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (None, r"gave NoneType; expected \(inputs, labels\).* or a dict with train and test"),
        ({"train": 1, "test": 2}, r"expected \(inputs, labels\)"),
        ({"train": (np.zeros((2, 3)), [0, 1]), "test": ()}, "a tuple of 0; expected"),
        ({"test": (np.zeros((2, 3)), [0, 1])}, "none to train on"),
        ({"train": (np.zeros((2, 3), complex), [0, 1])}, "inputs are complex128 of shape"),
        ({"train": (np.zeros((2, 3), int), [0])}, "2 inputs and 1 labels"),
        ({"train": (np.zeros((2, 3), int), [None, 1])}, "a label is missing"),
        ({"train": (np.full((2, 3), -1), [0, 0])}, "token ids must lie between"),
        ({"train": (np.zeros((1, 3), int), [0], [1, 2]), "test": ()}, "owners of shape"),
        (
            {"train": (np.zeros((1, 3), int), [-1]), "test": (np.zeros((1, 3), int), [0])},
            "label -1",
        ),
        ({"train": (np.zeros((1, 3), int), [0]), "test": (np.zeros((1, 4), int), [0])}, "be alike"),
    ],
)
def test_ones_own_function_returns_something_else(monkeypatch, made, complaint):
    monkeypatch.setattr(sys.modules[__name__], "own_images", lambda data_dir: made)
    with pytest.raises(InvalidData, match=complaint):
        data.load(f"{__name__}:own_images")


@pytest.mark.parametrize(
    "name", ["no.such.module:load", "math:no_such_name", "math:pi", ":x", "x:"]
)
def test_ones_own_function_is_not_there(name):
    with pytest.raises(DataNotFound, match=r"import|not a function"):
        data.load(name)


# --- the cache -----------------------------------------------------------------------------------


def cached_files(tmp_path):
    return sorted((tmp_path / "cache").rglob("*.safetensors"))


def test_the_second_time_reads_the_cache_only(root, tmp_path):
    write_cifar10(root)
    data.load("cifar10", data_dir=root)
    code = (
        "import sys; from cocofl.data import load;"
        f"print(len(load('cifar10', data_dir={str(root)!r}).train),"
        "[m for m in ('datasets', 'PIL', 'pyarrow') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout == "40 []\n"


def test_one_file_per_split_and_nothing_else(root, tmp_path):
    write_cifar10(root)
    data.load("cifar10", data_dir=root)
    assert len(cached_files(tmp_path)) == 2
    assert len([p for p in (tmp_path / "cache").rglob("*") if p.is_file()]) == 2


@pytest.mark.parametrize("which", ["train", "test"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content[:-100] + bytes(100),
        lambda content: content + b"more",
    ],
    ids=["half-written", "empty", "zeroed", "longer"],
)
def test_a_broken_cache_is_rebuilt(root, tmp_path, caplog, which, damage):
    write_cifar10(root)
    before = data.load("cifar10", data_dir=root)
    inputs = before.train.inputs.copy()
    broken = next(path for path in cached_files(tmp_path) if which in path.name)
    whole = broken.read_bytes()
    replacement = broken.with_suffix(".new")
    replacement.write_bytes(damage(whole))
    replacement.replace(broken)
    with caplog.at_level(logging.WARNING, "cocofl.data"):
        after = data.load("cifar10", data_dir=root)
    assert "rebuilding a broken cache" in caplog.text
    assert np.array_equal(after.train.inputs, inputs)
    assert broken.read_bytes() == whole


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("COCOFL_CACHE", str(tmp_path / "a file"))
    with pytest.raises(InvalidData, match=r"Is there space.*COCOFL_CACHE names another folder"):
        data.load("digits")


def test_other_files_in_the_folder_make_another_cache(root, tmp_path):
    folder = write_cifar10(root)
    data.load("cifar10", data_dir=root)
    write_cifar10(root, n_train=50)
    assert len(data.load("cifar10", data_dir=root).train) == 50
    os.utime(folder / "test-00000-of-00001.parquet", (1, 1))
    data.load("cifar10", data_dir=root)
    assert len(cached_files(tmp_path)) == 6


# --- finding -------------------------------------------------------------------------------------


def test_without_the_library_it_says_which_cache_is_not_there(root, monkeypatch):
    write_cifar10(root)
    for name in ("cocofl.data.vision", "cocofl.data.huggingface"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataNotFound) as caught:
        data.load("cifar10", data_dir=root)
    missing = cache_paths("cifar10", Origin(root / "uoft-cs/cifar10"))["train"]
    assert str(caught.value) == (
        f"cifar10 has to be converted first, for there is no {missing}: cocofl.data.vision:cifar10 "
        "needs the library datasets: pip install 'cocofl[data]'"
    )


def test_several_folders_in_the_environment(root, tmp_path, monkeypatch):
    write_cifar10(root)
    other = tmp_path / "other"
    other.mkdir()
    monkeypatch.setenv("COCOFL_DATA", f"{other}{os.pathsep}{root}")
    assert len(data.load("cifar10").train) == 40
    assert data.listing("cifar10").state == "ready"


def test_a_missing_folder(tmp_path, monkeypatch):
    with pytest.raises(DataNotFound, match=r"nowhere, but there is no such folder\. Create it"):
        data.load("cifar10", data_dir=tmp_path / "nowhere")
    monkeypatch.setenv("COCOFL_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(DataNotFound, match=r"COCOFL_DATA is .*nowhere"):
        data.load("cifar10")


def test_a_folder_without_this_data_set(root):
    with pytest.raises(DataNotFound, match="looked for the folder uoft-cs/cifar10"):
        data.load("cifar10", data_dir=root)


def test_a_folder_without_the_test_split(root):
    folder = write_cifar10(root)
    (folder / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(DataNotFound, match=r"no file named test\.parquet or test-\*\.parquet"):
        data.load("cifar10", data_dir=root)


def test_the_hub_out_of_reach():
    # In a process of its own: the Hub's library looks once, on import, whether it is offline.
    result = subprocess.run(
        [sys.executable, "-c", "from cocofl.data import load; load('cifar10')"],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    complaint = result.stderr.splitlines()[-1]
    assert "DataNotFound: could not load uoft-cs/cifar10 (train) from the Hub" in complaint
    assert "COCOFL_DATA=FOLDER in the environment, or data.dir in the experiment" in complaint


def test_not_on_the_hub():
    with pytest.raises(DataNotFound, match="xchest is not on the Hub: unpack NIH"):
        data.load("xchest")


def test_unknown_names():
    with pytest.raises(DataNotFound, match="did you mean cifar10"):
        data.load("cifar-10")
    with pytest.raises(DataNotFound, match="no preset 'papr'"):
        data.load("digits", preset="papr")


@pytest.mark.parametrize("name", data.REGISTRY)
def test_every_entry_is_complete(name, root):
    source = data.REGISTRY[name]
    assert callable(import_ours(f"cocofl.data.{source.build}", DataNotFound))
    assert source.hub or source.folders or source.package
    listing = data.listing(name)
    assert listing.place
    assert listing.train_samples > listing.num_classes > 1
    if not source.package:
        assert data.listing(name, data_dir=root).state == "missing"
        with pytest.raises(CocoflError):
            data.load(name, data_dir=root)


# --- files that are wrong ------------------------------------------------------------------------


def test_a_parquet_without_the_expected_columns(root):
    for split in ("train", "test"):
        columns = {"picture": pixels(2, 32, 32, 3), "label": np.array([0, 1])}
        write_parquet(root / f"uoft-cs/cifar10/plain_text/{split}.parquet", columns)
    with pytest.raises(InvalidData, match="has the columns picture, label; expected img or image"):
        data.load("cifar10", data_dir=root)


@pytest.mark.parametrize("split", ["train", "test"])
def test_labels_out_of_range(root, split):
    folder = write_cifar10(root)
    columns = {"img": pixels(2, 32, 32, 3), "label": np.array([0, 10])}
    write_parquet(folder / f"{split}-00000-of-00001.parquet", columns)
    with pytest.raises(InvalidData, match=rf"{split}-0.*parquet: sample 1 has label 10.*0 to 9"):
        data.load("cifar10", data_dir=root)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        (
            {"img": pixels(2, 32, 32, 3), "label": ["cat", "dog"]},
            "expected an integer in every row",
        ),
        ({"img": pixels(2, 32, 32, 3), "label": [0, None]}, "1 values missing"),
        ({"img": pixels(2, 16, 16, 3), "label": [0, 1]}, "is 16x16 pixels, expected 32x32"),
        ({"img": [0.5, 0.25], "label": [0, 1]}, "expected images"),
        ({"img": [{"bytes": b"no image", "path": None}], "label": [0]}, "no readable image"),
    ],
)
def test_columns_of_the_wrong_kind(root, columns, complaint):
    folder = write_cifar10(root)
    write_parquet(folder / "train-00000-of-00001.parquet", columns)
    with pytest.raises(InvalidData, match=complaint):
        data.load("cifar10", data_dir=root)


def test_a_path_inside_a_parquet_is_not_followed(root, tmp_path):
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(pixels(1, 32, 32, 3)[0]))
    folder = write_cifar10(root)
    cell = pa.array(
        [{"bytes": None, "path": str(secret)}],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    write_parquet(folder / "train-00000-of-00001.parquet", {"img": cell, "label": [0]})
    with pytest.raises(InvalidData, match="row 0 has no image bytes"):
        data.load("cifar10", data_dir=root)


def test_too_many_class_names(root):
    folder = write_cifar10(root)
    features = {
        "img": {"_type": "Image"},
        "label": {"names": list("abcdefghijkl"), "_type": "ClassLabel"},
    }
    columns = {"img": pixels(2, 32, 32, 3), "label": np.array([0, 1])}
    write_parquet(folder / "train-00000-of-00001.parquet", columns, features)
    with pytest.raises(InvalidData, match="names 12 classes in column label, expected 10"):
        data.load("cifar10", data_dir=root)


def test_a_parquet_cut_short(root):
    folder = write_cifar10(root)
    path = folder / "train-00000-of-00001.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(
        InvalidData, match=r"cannot read .*train.* as parquet.*Is the file complete"
    ):
        data.load("cifar10", data_dir=root)


def test_an_image_of_gigapixels_is_not_decoded():
    buffer = io.BytesIO()
    Image.new("1", (9000, 9000)).save(buffer, "PNG")
    with pytest.raises(InvalidData, match="announces 9000x9000 pixels"):
        images.decode(buffer.getvalue(), (32, 32, 3), "it", resize=True)


def test_an_origin_says_where_it_is(root):
    assert str(Origin(root)) == str(root)
    assert str(Origin(None, "a/b")) == "the Hub's a/b"


def test_no_message_advises_an_option_that_only_some_commands_have():
    for path in pathlib.Path(data.__file__).parent.glob("*.py"):
        assert "--data-dir" not in path.read_text(), path.name
