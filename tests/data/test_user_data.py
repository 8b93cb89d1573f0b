"""Data of one's own, as it is: every kind of source, label and input, and what is wrong with it."""

from __future__ import annotations

import io
import zipfile

import datasets
import numpy as np
import pandas
import pytest
import tokenizers
import torch
from data_files import pixels, png
from PIL import Image
from torch.utils.data import TensorDataset

from cocofl import data
from cocofl.data import UserData, normalise
from cocofl.data.data_files import is_path
from cocofl.data.labels import recoded
from cocofl.data.statistics import NumberStatistics
from cocofl.errors import CocoflError, DataNotFound, InvalidData
from cocofl.flower.records import shared_facts, with_shared_facts

SERIES = np.random.default_rng(0).normal(5, 2, (10, 3, 4))
TWO = [0, 1] * 5


def load(source, **options):
    return data.load(UserData(source, **options))


# --- inputs --------------------------------------------------------------------------------------


def test_series_are_normalised_by_channel_with_the_training_part():
    values = SERIES * [[1], [100], [0]] + [[0], [1e5], [7]]
    found = load({"train": (values, TWO), "test": (values[:2], [0, 1])})
    assert found.facts.task == "numeric"
    assert np.allclose(found.facts.mean, values.mean((0, 2)))
    assert np.allclose(found.facts.std[:2], values.std((0, 2))[:2])
    assert found.facts.std[2] == 1.0  # it never changes
    assert found.test.facts.mean == found.facts.mean
    inputs, _ = found.train.batch(np.arange(10))
    normal = normalise(inputs, found.facts)
    assert np.allclose(normal.mean((0, 2)), 0, atol=1e-2)
    assert np.allclose(normal[:, :2].std((0, 2)), 1, atol=1e-2)


def test_statistics_do_not_depend_on_chunks():
    values = np.random.default_rng(0).normal(1e6, 1e-3, (9, 2, 3))
    found = NumberStatistics(2)
    for chunk in (values[:1], values[1:8], values[8:]):
        found.add(chunk)
    mean, std = found.moments()
    assert np.allclose(mean, values.mean((0, 2)), rtol=1e-15)
    assert np.allclose(std, values.std((0, 2)), rtol=1e-6)


def test_normalising_can_be_left_out_or_said():
    plain = load((SERIES, TWO), normalise=False)
    inputs, _ = plain.train.batch(np.arange(len(plain.train)))
    assert np.array_equal(normalise(inputs, plain.facts), inputs)
    said = load((SERIES, TWO), normalise={"mean": [5, 5, 5], "std": [2, 2, 4]})
    assert said.facts.mean == (5.0, 5.0, 5.0)
    assert np.allclose(normalise(inputs, said.facts), (inputs - 5) / np.array([[2], [2], [4]]))
    grey = load((pixels(10, 4, 4), TWO), normalise=False)  # pixels count from 0 to 1
    assert normalise(grey.train.inputs, grey.facts).max() <= 1.0


@pytest.mark.parametrize(
    ("inputs", "task", "shape"),
    [
        (np.zeros((10, 7)), "numeric", (7,)),
        (np.zeros(10), "numeric", (1,)),
        (np.zeros((10, 6, 5, 5), np.float16), "numeric", (6, 5, 5)),
        (np.zeros((10, 2, 9), np.int16), "numeric", (2, 9)),
        (np.zeros((10, 4, 4), np.uint8), "image", (4, 4, 1)),
        (np.zeros((10, 4, 4, 5), np.uint8), "image", (4, 4, 5)),
        (torch.zeros(10, 5, 4, 3, dtype=torch.uint8), "image", (4, 3, 5)),
        (np.full((10, 3), 100_000), "text", (3,)),
    ],
)
def test_what_inputs_are(inputs, task, shape):
    found = load((inputs, TWO))
    assert (found.facts.task, found.train.inputs.shape[1:]) == (task, shape)


# --- labels --------------------------------------------------------------------------------------


def test_text_becomes_classes_by_sorted_names():
    found = load({"train": (SERIES[:3], ["walk", "run", "walk"]), "test": (SERIES[:1], ["sit"])})
    assert found.facts.class_names == ("run", "sit", "walk")
    assert found.train.labels.tolist() == [2, 0, 2]
    assert found.test.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("labels", "kind", "names", "first"),
    [
        (np.eye(5)[[*range(5)] * 2].astype(bool), "multilabel", tuple("01234"), [1, 0, 0, 0, 0]),
        ([[1, 0, 1], [0, 0, 1]] * 5, "multilabel", tuple("012"), [1, 0, 1]),
        ([["b", "a"], ["c"]] * 5, "multilabel", tuple("abc"), [1, 1, 0]),
        ([[], ["c"]] * 5, "multilabel", ("c",), [0]),
        ([[1, 2, 3], [0, 0, 1]] * 5, "tokens", tuple("0123"), [1, 2, 3]),
        (np.linspace(0, 1, 10), "numbers", ("0",), 0.0),
        (np.ones((10, 2), np.float64), "numbers", tuple("01"), [1.0, 1.0]),
        ([True, False] * 5, "classes", tuple("01"), 1),
    ],
)
def test_what_labels_are(labels, kind, names, first):
    own = (SERIES, labels)
    found = load({"train": own, "test": own})
    assert (found.facts.labels, found.facts.class_names) == (kind, names)
    assert found.train.labels[0].tolist() == first


def test_the_kind_can_be_said():
    several = load((SERIES, np.eye(2)[[0, 1] * 5]), kind="multilabel")
    assert several.facts.class_names == ("0", "1")
    assert several.train.labels.sum(1).tolist() == [1] * len(several.train.labels)
    found = load((SERIES, [3, 4] * 5), kind="numbers")
    assert found.facts.labels == "numbers"
    assert sorted(set(found.train.labels.tolist())) == [3.0, 4.0]


def test_labels_of_a_device_follow_the_names_of_the_server():
    server = load((SERIES, ["run", "sit", "walk", "run", "sit"] * 2))
    device = load({"train": (SERIES[:2], ["walk", "run"]), "test": (SERIES[:1], ["walk"])})
    alike = with_shared_facts(device, shared_facts(server))
    assert (device.train.labels.tolist(), alike.train.labels.tolist()) == ([1, 0], [2, 0])
    assert (alike.facts.mean, alike.facts.num_classes) == (server.facts.mean, 3)
    several = recoded(np.array([[1, 0]]), "multilabel", ["b", "d"], ["a", "b", "c", "d"])
    assert several.tolist() == [[0, 1, 0, 0]]
    with pytest.raises(InvalidData, match="do not know, like 'fly'; they know 'run'"):
        recoded(np.array([0]), "classes", ["fly"], ["run", "walk"])


# --- sources -------------------------------------------------------------------------------------


def test_a_data_set_of_pytorch():
    found = load(TensorDataset(torch.from_numpy(SERIES), torch.tensor(TWO)))
    assert found.train.inputs.shape == (8, 3, 4)
    assert len(found.test) == 2

    class Named:
        classes = ("cat", "dog")

        def __len__(self):
            return 6

        def __getitem__(self, row):
            return torch.full((3, 4, 4), row, dtype=torch.uint8), row % 2, f"owner {row % 3}"

    named = load(Named())
    assert named.facts.class_names == ("cat", "dog")
    assert named.train.inputs.shape[1:] == (4, 4, 3)
    assert named.facts.owner_names == ("owner 0", "owner 1", "owner 2")


def test_a_hugging_face_data_set_of_columns():
    rows = {
        "ax": SERIES[:, 0].tolist(),
        "ay": SERIES[:, 1].tolist(),
        "who": TWO,
        "what": ["a", "b"] * 5,
    }
    table = datasets.Dataset.from_dict(rows)
    found = load(
        datasets.DatasetDict({"train": table, "test": table.select([3, 1])}),
        labels="what", owners="who",
    )  # fmt: skip
    assert found.train.inputs.shape == (10, 2, 4)  # series are channels
    assert np.allclose(found.test.inputs[0, 1], SERIES[3, 1])
    assert found.facts.class_names == ("a", "b")
    assert found.train.owners.tolist() == TWO


@pytest.mark.parametrize(
    "labels", [[[0], [1, 2], [], [2], [0, 1], [2]], [[0, 1], [1, 2]] * 3], ids=["any", "two each"]
)
def test_images_in_a_hugging_face_data_set_with_several_labels(labels):
    images = pixels(6, 5, 7, 3)
    rows = {"image": [{"bytes": png(image), "path": None} for image in images]}
    rows["labels"] = labels
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "labels": datasets.List(datasets.ClassLabel(names=["x", "y", "z"])),
        }
    )
    table = datasets.Dataset.from_dict(rows, features)
    found = load({"train": table, "test": table})
    assert np.array_equal(found.train.inputs, images)
    assert found.facts.class_names == ("x", "y", "z")
    assert found.train.labels[1].tolist() == [0, 1, 1]


def test_what_one_column_is_left_is_the_input():
    def shape(values):
        rows = datasets.Dataset.from_dict({"signal": values, "label": TWO})
        return load(rows, tokenizer="bytes", length=5).train.inputs.shape[1:]

    assert shape(SERIES.tolist()) == (3, 4)
    assert shape(SERIES[:, 0].tolist()) == (1, 4)
    assert shape(SERIES[:, 0, 0].tolist()) == (1,)
    assert shape(["text"] * 10) == (5,)


def test_a_table_of_pandas_and_numbers_that_numpy_does_not_know():
    frame = pandas.DataFrame(SERIES[:, 0], columns=list("abcd")).assign(label=["x", "y"] * 5)
    found = load(frame)
    assert (found.train.inputs.shape, found.facts.class_names) == ((8, 4), ("x", "y"))
    bfloat16 = torch.from_numpy(SERIES).bfloat16()
    assert load((bfloat16, TWO)).train.inputs.dtype == np.float32
    assert load(TensorDataset(bfloat16, torch.tensor(TWO))).train.inputs.shape == (8, 3, 4)


def test_validation_is_tested_with_where_there_is_no_test():
    one, other = (SERIES, TWO), (SERIES[:4], TWO[:4])
    found = load({"train": one, "validation": other})
    assert (len(found.train), len(found.test)) == (10, 4)
    found = load({"train": one, "validation": other, "test": (SERIES[:3], [0, 1, 0])})
    assert len(found.test) == 3


@pytest.mark.parametrize("part", ["val", "valid", "validation"])
def test_validation_in_a_file_of_arrays_is_tested_with_too(root, part):
    own = {"x_train": SERIES, "y_train": TWO, f"x_{part}": SERIES[:4], f"y_{part}": TWO[:4]}
    np.savez(root / "a.npz", **own)
    np.savez(root / "b.npz", **own, test_x=SERIES[:3], test_y=[0, 1, 0])
    found = [data.load(str(root / name)) for name in ("a.npz", "b.npz")]
    assert [(len(one.train), len(one.test)) for one in found] == [(10, 4), (10, 3)]
    np.savez(root / "c.npz", x=SERIES, y=TWO, **{f"x_{part}": SERIES[:4], f"y_{part}": TWO[:4]})
    found = data.load(str(root / "c.npz"))
    assert (len(found.train), len(found.test)) == (10, 4)


@pytest.mark.parametrize("part", ["val", "valid", "validation"])
def test_validation_in_a_folder_is_tested_with_too(root, part):
    (root / "tables").mkdir()
    rows = "".join(f"{row},{row % 2}\n" for row in range(10))
    (root / "tables/train.csv").write_text(f"a,label\n{rows}")
    (root / f"tables/{part}.csv").write_text(f"a,label\n{rows[:16]}")
    for row, image in enumerate(pixels(14, 4, 4, 3)):
        place = root / "photos" / ("train" if row < 10 else part) / ("cat", "dog")[row % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row}.png").write_bytes(png(image))
    found = [data.load(f"{root}/{folder}") for folder in ("tables", "photos")]
    assert [(len(one.train), len(one.test)) for one in found] == [(10, 4), (10, 4)]


def test_folders_of_images_that_hold_none(root, caplog):
    for row, image in enumerate(pixels(10, 6, 8, 3)):
        place = root / "photos" / ("cat", "dog", ".ipynb_checkpoints")[row % 3]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row}.png").write_bytes(png(image))
    (root / "photos/cat/._0.png").write_bytes(b"macOS writes such")
    (root / "photos/bird").mkdir()
    found = data.load(f"{root}/photos")
    assert found.facts.class_names == ("cat", "dog")
    assert caplog.messages == [f"{root}/photos/bird has no images: there is no class of that name"]


def test_a_folder_of_images(root):
    for row, image in enumerate(pixels(10, 6, 8, 3)):
        place = root / "photos" / ("cat", "dog")[row % 2]
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{row}.png").write_bytes(png(image))
    found = data.load(f"{root}/photos", options={"test": 0.3})
    assert found.facts.class_names == ("cat", "dog")
    assert (found.train.inputs.shape, len(found.test)) == ((7, 6, 8, 3), 3)
    small = data.load("photos/", data_dir=root, options={"size": [3, 4], "channels": 1})
    assert small.train.inputs.shape[1:] == (3, 4, 1)
    (root / "photos/cat/odd.png").write_bytes(png(pixels(1, 5, 5, 3)[0]))
    with pytest.raises(InvalidData, match=r"odd\.png is 5x5 pixels, expected 8x6\. Say size = "):
        data.load(f"{root}/photos")
    (root / "photos/cat/odd.png").write_bytes(b"no image")
    with pytest.raises(InvalidData, match=r"cat/odd\.png is no readable image: expected PNG, JPEG"):
        data.load(f"{root}/photos")
    for path in (root / "photos").glob("*/*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(InvalidData, match=r"photos/cat/\w+\.png is no readable image"):
        data.load(f"{root}/photos")


def write_csv(path):
    lines = [f"{row},{row / 2},p{row % 3},{5 + row % 2},{row % 2},1" for row in range(12)]
    path.write_text("\n".join(["a,b,person,state,on,off", *lines]))
    return path


def test_a_csv_table(root):
    path = write_csv(root / "readings.csv")
    options = {"inputs": ["a", "b"], "labels": "state", "owners": "person"}
    found = data.load(str(path), options=options)
    assert found.train.inputs.shape[1:] == (2,)
    assert found.facts.class_names == ("5", "6")  # they need not count from 0
    assert found.facts.owner_names == ("p0", "p1", "p2")
    several = data.load(str(path), options={**options, "labels": ["on", "off"]})
    assert (several.facts.labels, several.facts.class_names) == ("multilabel", ("on", "off"))
    number = data.load(str(path), options={**options, "labels": "state", "kind": "numbers"})
    assert number.facts.labels == "numbers"


def test_axes_of_a_sensor_are_inputs_whatever_they_are_called(root):
    lines = [f"{row},{row / 3},{-row},{row % 2}" for row in range(12)]
    (root / "motion.csv").write_text("\n".join(["x,y,z,label", *lines]))
    assert data.load(str(root / "motion.csv")).train.inputs.shape[1:] == (3,)


def test_arrays_in_a_file(root):
    np.savez(root / "a.npz", x_train=SERIES, y_train=TWO, x_test=SERIES[:2], y_test=[0, 1])
    np.savez(root / "b.npz", inputs=SERIES, labels=np.array(["a", "b"] * 5), owners=TWO)
    first, second = data.load("a.npz", data_dir=root), data.load(str(root / "b.npz"))
    assert (len(first.train), len(first.test)) == (10, 2)
    assert second.facts.class_names == ("a", "b")
    assert second.train.owners is not None


def test_texts_by_a_tokenizer(root):
    texts = ["a b", "b b b b", "c"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2, "c": 3}))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(root / "tokenizer.json"))
    (root / "texts.csv").write_text(
        "text,label\n" + "".join(f"{text},{text[0]}\n" for text in texts)
    )
    options = {"tokenizer": "tokenizer.json", "length": 3}
    from_file = data.load(str(root / "texts.csv"), options=options)
    assert from_file.facts.vocab_size == 4
    own = (texts, [0, 1, 0])
    found = load({"train": own, "test": own}, tokenizer=words, length=3)
    assert found.train.inputs.tolist() == [[1, 2, 0], [2, 2, 2], [3, 0, 0]]
    lengths = load(
        {"train": own, "test": own}, tokenizer=lambda some: [[len(t)] for t in some], length=1
    )
    assert lengths.train.inputs.tolist() == [[3], [7], [1]]


# --- what is wrong -------------------------------------------------------------------------------


def test_paths_and_names():
    assert is_path("x/y.csv")
    assert not is_path("package.module:function")
    with pytest.raises(DataNotFound, match=r"there is no nowhere\.csv"):
        data.load("nowhere.csv")
    with pytest.raises(DataNotFound, match="digits takes none"):
        data.load("digits", options={"size": 3})


@pytest.mark.parametrize(
    ("source", "options", "complaint"),
    [
        ((np.full((4, 2), np.nan), [0, 1] * 2), {}, "sample 0 has something that is no finite"),
        ((np.full((4, 2), 1e300), [0, 1] * 2), {}, "no finite number"),
        ((np.zeros((4, 2)), [0, 1] * 2), {"normalise": {"mean": [0], "std": [1]}}, "expected 2"),
        ((np.zeros((4, 2)), [0, 1] * 2), {"normalise": {"mean": [0, 0], "std": [1, 0]}}, "above 0"),
        ((["a"] * 4, [0, 1] * 2), {}, "no tokenizer is named"),
        ((np.zeros((4, 2)), [0, 1] * 2), {"kind": "numbers!"}, "kind is 'numbers!'"),
        ((np.zeros((4, 2)), [0, 1] * 2), {"test": 2}, "test is 2, but should be a share"),
        ((np.zeros((4, 2)), ["a", "b"] * 2), {"kind": "numbers"}, "expected numbers"),
        ((np.zeros((4, 70_000)), [0, 1] * 2), {}, "70000 channels or features"),
        ({"inputs": np.zeros((4, 2)), "what": [0] * 4}, {}, "none of which is called labels"),
        ({"inputs": np.zeros((4, 2)), "what": [0] * 4}, {"labels": "wat"}, "did you mean what"),
        (iter([]), {}, "gave list_iterator; expected"),
        ((np.zeros((2, 2)), ["a", "b" * 2000]), {}, "a name has 2000 characters"),
        ((np.zeros((2, 2)), [0, 1], ["a", "b" * 2000]), {}, "a name has 2000 characters"),
        ([1, 2], {}, r"a sample is a int; expected \(input, label\)"),
        ((np.diag([0, 0, 0, np.inf, 0]), [0] * 5), {}, r"sample 3 has .* no finite .* feature\) 3"),
        (([[1.0], [1.0, 2.0]], [0, 1]), {}, "samples have different shapes; cut or pad them"),
        ((np.zeros((4, 2)), [0, 1] * 2, ["a", "b", "a", None]), {}, "a sample has no owner"),
        ((np.zeros((4, 2)), [0, 1] * 2, [1.0, 2.0, 1.0, np.nan]), {}, "a sample has no owner"),
        ([(1.0, 0), (1.0, 0, 0)], {}, "sample 1 is a tuple of 3, sample 0 is a tuple of 2"),
        ([{"x": 1.0, "y": 0}, {"x": 1.0}], {}, "sample 1 is a dict of x, sample 0 is a dict of x"),
        ((np.zeros((4, 2)), [0, 10**12] * 2), {}, "counted from 0, and a label is 1000000000000"),
        ((np.zeros((4, 2)), ["a", None] * 2), {}, "a label is missing; expected a class"),
        ((np.zeros((4, 2)), np.full((4, 2), 0.5)), {"kind": "multilabel"}, "labels are fractions"),
        ((np.zeros((4, 2)), 3), {}, "labels are 3; expected one per sample"),
        ((torch.zeros(4, 2).to_sparse(), [0, 1] * 2), {}, "a tensor cannot be read as an array"),
        (datasets.Dataset.from_dict({"a": [[1.0], [1.0, 2.0]], "label": [0, 1]}), {},
         "column a is an input, but has rows of different lengths; cut or pad them"),
    ],
)  # fmt: skip
def test_data_that_cannot_be(source, options, complaint):
    with pytest.raises(InvalidData, match=complaint):
        load(source, **options)


def test_options_that_nobody_knows(root):
    path = write_csv(root / "readings.csv")
    with pytest.raises(InvalidData, match=r"data.options.label \(did you mean labels\?\)"):
        data.load(str(path), options={"label": "state"})
    with pytest.raises(InvalidData, match="column person is an input, but holds no numbers"):
        data.load(str(path), options={"labels": "state"})
    path.write_text("a,label\n1,x\n,y\n")
    with pytest.raises(InvalidData, match="line 3 has nothing in column a"):
        data.load(str(path))


@pytest.mark.parametrize(
    ("table", "complaint"),
    [
        ("a,label\n1,x\nnan,y\n", "line 3 has nan in column a; fill in or leave out"),
        ("a,label\n1,0.5\n2,inf\n", "line 3 has inf in column label"),
        (
            "a,b,label\n1,2,x\nNA,4,y\n",
            "column a is an input, but sample 1 has 'NA', which is no number",
        ),
        ("a;b;label\n1,5;2;x\n", r"readings.csv as CSV: it looks separated by ';'; expected a com"),
        ("a\tlabel\n1\tx\n", r"it looks separated by '\\t'; expected a comma"),
    ],
)
def test_what_is_wrong_with_a_table_is_named(root, table, complaint):
    (root / "readings.csv").write_text(table)
    with pytest.raises(InvalidData, match=complaint):
        data.load(str(root / "readings.csv"))


def test_a_table_of_a_spreadsheet_may_begin_with_a_mark(root):
    path = write_csv(root / "readings.csv")
    path.write_text("\ufeff" + path.read_text())
    options = {"inputs": ["a", "b"], "labels": "state"}
    assert data.load(str(path), options=options).train.inputs.shape[1:] == (2,)


def test_a_sample_that_cannot_be_read_is_named():
    class Broken:
        def __len__(self):
            return 6

        def __getitem__(self, row):
            if row == 4:
                raise OSError("disk gone")
            return [1.0, 2.0], 0

    with pytest.raises(InvalidData, match="sample 4 cannot be read: OSError: disk gone"):
        load(Broken())


def npy(array_header: bytes) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(array_header).to_bytes(2, "little") + array_header


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999, 9)}\n"), "has less"),
        (npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"), "holds Python objects"),
        (b"nothing", "cannot read"),
    ],
)
def test_an_array_that_lies_is_not_allocated(root, content, complaint):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("inputs.npy", content)
    (root / "bad.npz").write_bytes(packed.getvalue())
    with pytest.raises(InvalidData, match=complaint):
        data.load(str(root / "bad.npz"))
    (root / "bad.npz").write_bytes(packed.getvalue()[:-30])
    with pytest.raises(CocoflError, match="cannot read"):
        data.load(str(root / "bad.npz"))


def test_zeros_that_unpack_to_gigabytes_are_not_read(root):
    with zipfile.ZipFile(root / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", bytes(10_000_000))
    with pytest.raises(InvalidData, match="its arrays have 10000000 bytes, of which at most"):
        data.load(str(root / "bomb.npz"))


def test_an_image_with_sixteen_bits_is_not_cut_off(root):
    (root / "photos/cat").mkdir(parents=True)
    for row in range(2):
        Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(root / f"photos/cat/{row}.png")
    with pytest.raises(InvalidData, match="more than 8 bits a pixel"):
        data.load(f"{root}/photos")


def test_a_changed_file_is_read_again(root):
    path = root / "a.csv"
    path.write_text("a,label\n" + "1,x\n2,y\n" * 5)
    assert len(data.load(str(path)).train) == 8
    path.write_text("a,label\n" + "1,x\n2,y\n" * 10)
    assert len(data.load(str(path)).train) == 16
