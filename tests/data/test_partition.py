"""Splits: every sample on exactly one device, the same everywhere, and skewed as asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cocofl.data import partition as pt
from cocofl.data import stable_random
from cocofl.errors import InvalidPartition
from cocofl.rng import stream

LABELS_10 = np.repeat(np.arange(10), 500)


def rc(labels, devices, seed, alpha=0.1, **how):
    groups = pt.equal_groups(devices, min(3, devices), seed)
    return pt.resource_correlated(labels, devices, seed, alpha=alpha, groups=groups, **how)


def plays(labels, devices, seed):
    n_groups = min(3, devices, len(np.unique(labels)))
    return pt.by_play(labels, devices, seed, groups=pt.equal_groups(devices, n_groups, seed))


PARTS: dict[str, Callable[..., pt.Partition]] = {
    "iid": pt.iid,
    "iid, drawn": lambda *a: pt.iid(*a, equal=False),
    "dirichlet": lambda *a: pt.dirichlet(*a, alpha=0.1),
    "dirichlet, drawn": lambda *a: pt.dirichlet(*a, alpha=0.1, equal=False),
    "rc": rc,
    "rc, mixed": lambda *a: rc(*a, mixed=True),
    "rc, drawn": lambda *a: rc(*a, equal=False),
    "by_play": plays,
    "natural": lambda labels, devices, seed: pt.natural(
        labels, min(devices, len(np.unique(labels))), seed
    ),
}
EQUAL = {"iid", "dirichlet", "rc", "rc, mixed"}

labels_and_devices = st.lists(st.integers(0, 6), min_size=1, max_size=60).flatmap(
    lambda labels: st.tuples(st.just(np.array(labels)), st.integers(1, len(labels)))
)


@pytest.mark.parametrize("name", PARTS)
@given(case=labels_and_devices, seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_on_one_device_or_in_the_remainder(name, case, seed):
    labels, devices = case
    split = PARTS[name](labels, devices, seed)
    everything = np.concatenate([*split, split.remainder])
    assert sorted(everything.tolist()) == list(range(len(labels)))
    if name in EQUAL:
        assert set(split.sizes.tolist()) == {len(labels) // devices}
        assert len(split.remainder) == len(labels) % devices
    else:
        assert len(split.remainder) == 0


@given(alpha=st.floats(1e-6, 1e6), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_any_positive_alpha_gives_proportions(alpha, seed):
    labels = np.arange(200) % 4
    assert pt.dirichlet(labels, 10, seed, alpha=alpha).sizes.tolist() == [20] * 10
    assert rc(labels, 10, seed, alpha=alpha).sizes.tolist() == [20] * 10


@pytest.mark.parametrize(
    ("name", "checksum"),
    [
        ("iid", 1161280400),
        ("iid, drawn", 2174327827),
        ("dirichlet", 454416404),
        ("dirichlet, drawn", 467540597),
        ("rc", 2203005043),
        ("rc, drawn", 2261088275),
        ("by_play", 1964554545),
        ("natural", 1257106482),
    ],
)
def test_a_seed_gives_this_split_on_every_machine(name, checksum):
    split = PARTS[name](LABELS_10, 30, 42)
    flat = np.concatenate([split.offsets, split.indices, split.remainder]).astype("<i8")
    assert zlib.crc32(flat.tobytes()) == checksum


def test_a_cpu_without_wide_vectors_draws_the_same_split():
    # NumPy's log and cos take other paths on other CPUs; the split must not show it.
    code = (
        "import zlib, numpy as np; from cocofl.data.partition import dirichlet;"
        "split = dirichlet(np.arange(50_000) % 10, 500, 1, alpha=0.1, equal=False);"
        "print(zlib.crc32(split.indices.astype('<i8').tobytes()))"
    )
    narrow = {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX2 FMA3 AVX512F AVX512_SKX AVX512_ICL"}
    printed = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            env={**os.environ, **extra},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for extra in ({}, narrow)
    }
    assert len(printed) == 1


@pytest.mark.parametrize("name", PARTS)
def test_another_seed_gives_another_split(name):
    a, b = (PARTS[name](LABELS_10, 10, seed) for seed in (1, 2))
    assert a.indices.tolist() != b.indices.tolist()


def test_iid_devices_see_every_class_about_equally():
    counts = pt.class_counts(pt.iid(LABELS_10, 10, 0), LABELS_10, 10)
    assert counts.min() > 25
    assert counts.max() < 80


def test_dirichlet_leaves_few_classes_on_a_device_and_large_alpha_all():
    few = pt.class_counts(pt.dirichlet(LABELS_10, 50, 0, alpha=0.1), LABELS_10, 10)
    all_of_them = pt.class_counts(pt.dirichlet(LABELS_10, 50, 0, alpha=1000.0), LABELS_10, 10)
    top_three = np.sort(few, axis=1)[:, -3:].sum(axis=1) / few.sum(axis=1)
    assert top_three.mean() > 0.8
    assert (all_of_them > 0).all()


def test_drawn_proportions_have_the_moments_of_a_dirichlet_distribution():
    # Mean 1/K and variance (K - 1) / (K² (K alpha + 1)), for K parts.
    rng = stream(3, "test")
    for alpha in (0.1, 1.0, 7.0):
        shares = np.stack([stable_random.dirichlet(alpha, 4, rng) for _ in range(5_000)])
        assert np.allclose(shares.sum(axis=1), 1)
        assert np.allclose(shares.mean(axis=0), 0.25, atol=0.02)
        assert np.allclose(shares.var(axis=0), 3 / (16 * (4 * alpha + 1)), rtol=0.1)


def test_rc_leaves_each_class_mostly_in_one_group():
    top_shares = []
    for seed in range(20):
        groups = pt.equal_groups(99, 3, seed)
        split = pt.resource_correlated(LABELS_10, 99, seed, alpha=0.1, groups=groups)
        per_group = pt.class_counts(split, LABELS_10, 10, groups)
        top_shares.append(per_group.max(axis=0) / per_group.sum(axis=0))
    assert np.mean(top_shares) > 0.8
    assert np.median(top_shares) > 0.9


def test_mixed_rc_leaves_fewer_classes_to_one_group():
    """What spills over is a bit of every class, so most classes are found in two groups."""
    top_shares, alone = {}, {}
    for mixed in (False, True):
        found = []
        for seed in range(20):
            groups = pt.equal_groups(99, 3, seed)
            split = pt.resource_correlated(
                LABELS_10, 99, seed, alpha=0.1, groups=groups, mixed=mixed
            )
            per_group = pt.class_counts(split, LABELS_10, 10, groups)
            found.append(per_group.max(axis=0) / per_group.sum(axis=0))
        top_shares[mixed], alone[mixed] = np.mean(found), np.mean(np.array(found) > 0.95)
    assert 0.65 < top_shares[True] < top_shares[False] - 0.1
    assert alone[True] < 0.6 * alone[False]


def test_drawn_sizes_leave_nothing_to_mix():
    groups = pt.equal_groups(30, 3, 3)
    whole, mixed = (
        pt.class_counts(rc(LABELS_10, 30, 3, equal=False, mixed=mixed), LABELS_10, 10, groups)
        for mixed in (False, True)
    )
    assert np.array_equal(whole, mixed)


def test_rc_devices_of_one_group_see_the_same_mix():
    groups = np.array([0, 1, 2] * 10)
    split = pt.resource_correlated(LABELS_10, 30, 5, alpha=0.1, groups=groups)
    counts = pt.class_counts(split, LABELS_10, 10)
    densities = pt.class_densities(pt.class_counts(split, LABELS_10, 10, groups))
    expected = densities[groups] * counts.sum(axis=1, keepdims=True)
    assert np.abs(counts - expected).max() < 40  # 166 samples each: within chance of the mix


def test_rc_drawn_sizes_follow_the_draw_and_groups_may_be_unequal():
    groups = np.array([0] * 5 + [1] * 20)
    split = pt.resource_correlated(LABELS_10, 25, 1, alpha=0.3, groups=groups, equal=False)
    assert len(set(split.sizes.tolist())) > 1
    within = [split.sizes[groups == group] for group in (0, 1)]
    assert all(sizes.max() - sizes.min() <= 1 for sizes in within)


def test_plays_stay_within_one_group_and_groups_get_what_their_devices_deserve():
    plays_of = np.repeat(np.arange(25), 200)
    groups = pt.equal_groups(100, 3, 0)
    split = pt.by_play(plays_of, 100, 0, groups=groups)
    per_group = pt.class_counts(split, plays_of, 25, groups)
    assert ((per_group > 0).sum(axis=0) == 1).all()
    assert split.sizes.max() <= 1.3 * split.sizes.min()


def test_a_writer_stays_on_one_device():
    writers = np.arange(600) % 40
    split = pt.natural(writers, 7, 0)
    counts = pt.class_counts(split, writers, 40)
    assert ((counts > 0).sum(axis=0) == 1).all()
    assert (split.sizes > 0).all()


def test_a_hundred_thousand_devices_are_cheap():
    labels = np.arange(1_000_000) % 10
    started = time.perf_counter()
    split = pt.dirichlet(labels, 100_000, 0, alpha=0.5)
    assert time.perf_counter() - started < 10
    assert len(split) == 100_000
    assert split.indices.nbytes + split.offsets.nbytes < 10_000_000


def test_a_partition_cannot_be_changed():
    split = pt.iid(LABELS_10, 10, 0)
    with pytest.raises(ValueError, match="read-only"):
        split[0][0] = 7
    with pytest.raises(IndexError, match="device 10 of 10"):
        split[10]


def test_splitting_leaves_the_callers_arrays_alone():
    groups = pt.equal_groups(10, 3, 0)
    labels = LABELS_10.copy()
    pt.resource_correlated(labels, 10, 0, alpha=1.0, groups=groups)
    labels[0] = 3
    groups[0] = 1


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    "split", [lambda **k: pt.dirichlet([0, 1], 2, 0, **k), lambda **k: rc([0, 1], 2, 0, **k)]
)
def test_alpha_must_be_positive(split, alpha):
    with pytest.raises(InvalidPartition, match=r"alpha = .*above 0 and finite"):
        split(alpha=alpha)


@pytest.mark.parametrize("name", [name for name in PARTS if name != "natural"])
def test_more_devices_than_samples(name):
    with pytest.raises(InvalidPartition, match="3 samples cannot be split over 4 devices"):
        PARTS[name](np.array([0, 1, 2]), 4, 0)


def test_no_devices():
    with pytest.raises(InvalidPartition, match="over 0 devices"):
        pt.iid([0, 1], 0, 0)


@pytest.mark.parametrize("labels", [[[0, 1]], [0.5, 1.0], [-1, 2], ["a", "b"]])
def test_labels_must_be_a_row_of_integers_from_zero(labels):
    with pytest.raises(InvalidPartition, match="one label per sample as integers from 0"):
        pt.iid(labels, 1, 0)


@pytest.mark.parametrize("groups", [[0], [0, -1], [0.0, 1.0]])
def test_groups_must_name_one_group_per_device(groups):
    with pytest.raises(InvalidPartition, match="the group of each of the 2 devices"):
        pt.resource_correlated([0, 1], 2, 0, alpha=1.0, groups=groups)


def test_a_gap_in_the_group_numbers_would_lose_samples():
    with pytest.raises(InvalidPartition, match="no device in group 1"):
        pt.resource_correlated(LABELS_10, 2, 0, alpha=1.0, groups=[0, 2], equal=False)


def test_fewer_owners_than_devices_and_fewer_plays_than_groups():
    with pytest.raises(InvalidPartition, match=r"2 owners .* cannot fill 3 devices"):
        pt.natural([0, 0, 1, 1], 3, 0)
    with pytest.raises(InvalidPartition, match=r"1 plays .* cannot be distributed over 2 groups"):
        pt.by_play([0, 0, 0], 2, 0, groups=[0, 1])


def test_too_many_groups():
    with pytest.raises(InvalidPartition, match="2 devices cannot form 3 groups"):
        pt.equal_groups(2, 3, 0)
