"""The cached file: mapped, shared, checked; broken ones are seen before anything is allocated."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from cocofl.data import normalise, open_samples
from cocofl.data.samples import Facts, NewSamples, write_samples
from cocofl.errors import InvalidData

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 5, 3), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2, 0])
COLOUR = NewSamples(Facts("image", ("a", "b", "c"), channels=3), LABELS, (4, 5, 3), [IMAGES])
TEXT = NewSamples(
    Facts("text", ("neg", "pos"), vocab_size=400, pad_id=0, owner_kind="play", owner_names=("x",)),
    np.array([1, 0]),
    (3,),
    [np.array([[1, 2, 399], [4, 0, 0]], np.uint16)],
    dtype="uint16",
    owners=np.array([0, 0]),
    tokenizer=b"model",
)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "somewhere" / "split.safetensors"


def test_what_was_written_is_read_back(path):
    write_samples(path, replace(COLOUR, inputs=[IMAGES[:3], IMAGES[3:]]))
    split = open_samples(path, verify=True)
    assert np.array_equal(split.inputs, IMAGES)
    assert np.array_equal(split.labels, LABELS)
    assert split.owners is None
    assert split.facts.num_classes == 3
    assert len(split) == 7


def test_text_keeps_its_tokenizer_and_owners(path):
    write_samples(path, TEXT)
    split = open_samples(path, verify=True)
    assert split.tokenizer == b"model"
    assert split.owners.tolist() == [0, 0]
    inputs, labels = split.batch(np.array([0]))
    assert inputs.dtype == labels.dtype == np.int64
    assert inputs.tolist() == [[1, 2, 399]]


def test_any_safetensors_reader_can_read_it(path):
    write_samples(path, TEXT)
    arrays = load_file(path)
    assert sorted(arrays) == ["inputs", "labels", "owners", "tokenizer"]
    assert arrays["inputs"].tolist() == [[1, 2, 399], [4, 0, 0]]


def test_statistics_are_those_of_numpy_and_normalising_uses_them(path):
    write_samples(path, replace(COLOUR, inputs=[IMAGES[:2], IMAGES[2:]]))
    split = open_samples(path)
    assert np.allclose(split.facts.mean, (IMAGES / 255).mean(axis=(0, 1, 2)))
    assert np.allclose(split.facts.std, (IMAGES / 255).std(axis=(0, 1, 2)))
    normal = normalise(split.inputs, split.facts)
    assert normal.dtype == np.float32
    assert np.allclose(normal.mean(axis=(0, 1, 2)), 0, atol=1e-5)
    assert np.allclose(normal.std(axis=(0, 1, 2)), 1, atol=1e-5)


def test_grey_images_are_stored_once_and_shown_in_three_channels(path):
    grey = IMAGES[..., :1]
    write_samples(path, NewSamples(COLOUR.facts, LABELS, (4, 5, 1), [grey]))
    split = open_samples(path)
    assert split.inputs.shape == (7, 4, 5, 3)
    assert len(split.facts.mean) == 3
    batch, _ = split.batch(np.array([5, 1]))
    assert batch.flags.c_contiguous
    assert batch.flags.writeable
    assert np.array_equal(batch, np.repeat(grey[[5, 1]], 3, axis=-1))


def test_a_black_split_does_not_divide_by_zero(path):
    write_samples(path, replace(COLOUR, inputs=[np.zeros_like(IMAGES)]))
    split = open_samples(path)
    assert np.isfinite(normalise(split.inputs, split.facts)).all()


def test_a_split_travels_to_another_process_as_its_path(path):
    write_samples(path, replace(COLOUR, inputs=[IMAGES]))
    split = open_samples(path)
    assert len(pickle.dumps(split)) < 500
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_pixel_sum, (split,)) == int(IMAGES.sum())


def _pixel_sum(split):
    return int(split.inputs.sum())


def test_the_mapping_cannot_be_written_to(path):
    write_samples(path, replace(COLOUR, inputs=[IMAGES]))
    with pytest.raises(ValueError, match="read-only"):
        open_samples(path).labels[0] = 1


def test_labels_out_of_range(path):
    with pytest.raises(InvalidData, match=r"sample 2 has label 3.*labelled 0 to 2"):
        write_samples(path, replace(COLOUR, labels=np.array([0, 1, 3, 0, 1, 2, 0])))
    with pytest.raises(InvalidData, match="integers in 1 dimension"):
        write_samples(path, replace(COLOUR, labels=LABELS.astype(float)))
    assert not path.exists()


def test_fewer_inputs_than_labels_leave_nothing_behind(path):
    with pytest.raises(InvalidData, match="one input per label"):
        write_samples(path, replace(COLOUR, inputs=[IMAGES[:6]]))
    assert list(path.parent.iterdir()) == []


def test_a_failure_on_the_way_leaves_nothing_behind(path):
    def breaking():
        yield IMAGES[:3]
        raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_samples(path, replace(COLOUR, inputs=breaking()))
    assert list(path.parent.iterdir()) == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "split.safetensors"
    write_samples(path, replace(TEXT, inputs=TEXT.inputs))
    return path.read_bytes()


@given(length=st.integers(0, 10_000))
@settings(max_examples=50, deadline=None)
def test_a_file_cut_anywhere_is_refused(whole, tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "split.safetensors"
    path.write_bytes(whole[: length % len(whole)])
    with pytest.raises(InvalidData):
        open_samples(path)


@given(position=st.integers(0, 10_000), flip=st.integers(1, 255))
@settings(max_examples=150, deadline=None)
def test_any_changed_byte_is_seen(whole, tmp_path_factory, position, flip):
    path = tmp_path_factory.mktemp("flip") / "split.safetensors"
    changed = bytearray(whole)
    changed[position % len(whole)] ^= flip
    path.write_bytes(changed)
    with pytest.raises(InvalidData):
        open_samples(path, verify=True)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"__metadata__": {}}',
        json.dumps({"__metadata__": {"format": "cocofl.split.0"}}).encode(),
    ],
)
def test_headers_that_are_no_headers(path, header):
    path.parent.mkdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InvalidData):
        open_samples(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"shape":[2,3]', '"shape":[9,9]'),
        ('"shape":[2,3]', '"shape":[3,2]'),
        ('"shape":[2,3]', '"shape":[6]  '),
        ('"dtype":"U16"', '"dtype":"F64"'),
        ('"data_offsets":[0,16]', '"data_offsets":[8,24]'),
        ('\\"task\\": \\"text\\"', '\\"task\\": \\"tax!\\"'),
        ('\\"owner_names\\": [\\"x\\"]', '\\"owner_names\\": []     '),
        ('\\"class_names\\": [\\"neg\\", \\"pos\\"]', '\\"class_names\\": [\\"negpos!!\\"]'),
    ],
)
def test_headers_that_lie(whole, path, old, new):
    assert old.encode() in whole
    path.parent.mkdir()
    path.write_bytes(whole.replace(old.encode(), new.encode().ljust(len(old.encode()))))
    with pytest.raises(InvalidData):
        open_samples(path)


def test_a_header_of_exabytes_is_not_allocated(path):
    path.parent.mkdir()
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(InvalidData, match="announces a header of 4611686018427387904 bytes"):
        open_samples(path)


def test_no_file(path):
    with pytest.raises(InvalidData, match="cannot read the cached part"):
        open_samples(path)
