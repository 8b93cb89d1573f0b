"""Who holds which samples: pure functions of (labels, devices, seed).

The paper's three splits (``iid``, ``dirichlet``, ``resource_correlated``) give every device the
same number of samples, ⌊n/|C|⌋; the Dirichlet draw only orders the samples, and equal shares are
cut from that order. The n mod |C| samples left over are set aside *first* and at random, so that
no class and no device pays for them, and are reported as the remainder. ``equal=False`` keeps the
drawn sizes. ``by_play`` and ``natural`` follow what samples come with: plays, writers, patients.

The same seed gives the same split on every machine and with every NumPy (see ``stable_random``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from cocofl.data import stable_random
from cocofl.data.samples import Samples
from cocofl.data.stable_random import Floats, Ints, shuffled
from cocofl.errors import InvalidPartition
from cocofl.named import nearest
from cocofl.rng import stream

COUNTED = ("classes", "multilabel")
"""Labels of which a device has so many of each: see :func:`class_counts`."""


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every device: one flat array and where each device's part of it begins.

    Two arrays instead of a list of arrays keep 100 000 devices as cheap as ten, and a worker
    process receives them without copying a hundred thousand objects.

    >>> split = Partition(np.array([4, 2, 0]), np.array([0, 1, 3]), np.array([1, 3]))
    >>> len(split), split[1].tolist(), split.sizes.tolist()
    (2, [2, 0], [1, 2])
    """

    indices: Ints
    offsets: Ints
    remainder: Ints

    def __post_init__(self) -> None:
        assert self.offsets[0] == 0
        assert self.offsets[-1] == len(self.indices)
        assert (np.diff(self.offsets) >= 0).all()
        for array in (self.indices, self.offsets, self.remainder):
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, device: int) -> Ints:
        """The samples of one device, as a view."""
        if not 0 <= device < len(self):
            raise IndexError(f"device {device} of {len(self)}")
        return self.indices[self.offsets[device] : self.offsets[device + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[device] for device in range(len(self)))

    @property
    def sizes(self) -> Ints:
        """How many samples each device holds."""
        return np.diff(self.offsets)


def iid(labels: ArrayLike, devices: int, seed: int, *, equal: bool = True) -> Partition:
    """Deal the samples at random: every device sees about the same class mix.

    >>> split = iid([0, 1, 0, 1, 0], devices=2, seed=1)
    >>> split.sizes.tolist(), len(split.remainder)
    ([2, 2], 1)
    """
    codes = _checked_labels(labels, devices)
    rng = stream(seed, "partition.iid")
    order, remainder = _set_aside(len(codes), devices, rng, equal)
    one_group = np.zeros(devices, np.int64)
    return _deal_to_groups(order, np.array([len(order)]), one_group, remainder)


def dirichlet(
    labels: ArrayLike, devices: int, seed: int, *, alpha: float, equal: bool = True
) -> Partition:
    """Divide each class over the devices in Dirichlet proportions (Hsu et al., 2019).

    The smaller ``alpha``, the fewer classes a device sees. With ``equal`` what exceeds a device's
    share goes to the next device.

    >>> split = dirichlet([0, 1] * 50, devices=4, seed=1, alpha=0.1)
    >>> split.sizes.tolist()
    [25, 25, 25, 25]
    """
    rng = stream(seed, "partition.dirichlet")
    return _by_class(labels, np.arange(devices), rng, alpha=alpha, equal=equal, mixed=True)


def resource_correlated(
    labels: ArrayLike,
    devices: int,
    seed: int,
    *,
    alpha: float,
    groups: Sequence[int] | Ints,
    equal: bool = True,
    mixed: bool = False,
) -> Partition:
    """Divide each class over *groups* of devices, so that some classes live only on weak devices.

    ``groups[device]`` is the group of each device, 0, 1, …; :func:`equal_groups` draws one. Class
    proportions over the groups are Dirichlet; within a group samples are shuffled and dealt evenly.

    With ``equal`` every group receives as many samples as its devices' shares, cut from the drawn
    order. That order keeps the classes of a group together, so that what spills over into the next
    group is (nearly) whole classes. ``mixed`` shuffles first, and cuts device after device, as the
    paper's authors do in the code they published: most classes are then found in two groups.

    >>> split = resource_correlated([0, 1] * 6, 4, seed=1, alpha=0.01, groups=[0, 1, 0, 1])
    >>> [sorted(set((split[device] % 2).tolist())) for device in range(4)]
    [[0], [1], [0], [1]]
    """
    rng = stream(seed, "partition.resource_correlated")
    group_of = _checked_groups(groups, devices)
    return _by_class(labels, group_of, rng, alpha=alpha, equal=equal, mixed=mixed)


def by_play(
    plays: ArrayLike, devices: int, seed: int, *, groups: Sequence[int] | Ints
) -> Partition:
    """Distribute whole plays over groups of devices, as the paper does with LEAF's Shakespeare.

    Plays are visited in random order, and each goes to the group that lacks most of what its
    number of devices entitles it to. Within a group the windows are shuffled and dealt evenly
    (sizes differ by at most one), so nothing is left over.

    >>> split = by_play([0] * 4 + [1] * 4, 4, seed=1, groups=[0, 0, 1, 1])
    >>> split.sizes.tolist(), len({s // 4 for s in split[0].tolist()})
    ([2, 2, 2, 2], 1)
    """
    codes = _checked_labels(plays, devices, what="play")
    group_of = _checked_groups(groups, devices)
    rng = stream(seed, "partition.by_play")
    group_devices = np.bincount(group_of)
    names, play_of = np.unique(codes, return_inverse=True)
    if len(names) < len(group_devices):
        raise InvalidPartition(
            f"{len(names)} plays (or other owners) cannot be distributed over "
            f"{len(group_devices)} groups of devices; use fewer groups, or load more of them"
        )
    target = group_devices / devices * len(codes)
    group_of_play = _fill_evenly(np.bincount(play_of), target, rng)
    return _deal_parts(group_of_play[play_of], group_of, rng)


def natural(owners: ArrayLike, devices: int, seed: int) -> Partition:
    """Keep the samples of one owner (writer, patient, play) together on one device.

    Owners are dealt in random order; with fewer devices than owners several share a device. The
    sizes are what nature gives, so they are unequal and nothing is left over.

    >>> split = natural([7, 7, 9, 9, 9, 4], devices=3, seed=1)
    >>> sorted(split.sizes.tolist())
    [1, 2, 3]
    """
    codes = _checked_labels(owners, devices, what="owner")
    names, owner_of = np.unique(codes, return_inverse=True)
    if len(names) < devices:
        raise InvalidPartition(
            f"{len(names)} owners (people, writers, plays) cannot fill {devices} devices without "
            f"dividing one; use at most {len(names)} devices, or the iid split"
        )
    rng = stream(seed, "partition.natural")
    device_of_owner = np.empty(len(names), np.int64)
    device_of_owner[shuffled(np.arange(len(names)), rng)] = np.arange(len(names)) % devices
    return _deal_parts(device_of_owner[owner_of], np.arange(devices), rng)


def equal_groups(devices: int, n_groups: int, seed: int) -> Ints:
    """The group of each device: equally large groups at random, as in the paper.

    >>> np.bincount(equal_groups(10, 3, seed=0)).tolist()
    [4, 3, 3]
    """
    if not 1 <= n_groups <= devices:
        raise InvalidPartition(
            f"{devices} devices cannot form {n_groups} groups; use between 1 and {devices} groups"
        )
    groups = np.arange(devices) % n_groups
    return shuffled(groups, stream(seed, "partition.equal_groups"))


def class_counts(
    partition: Partition,
    labels: ArrayLike,
    num_classes: int,
    groups: Sequence[int] | Ints | None = None,
) -> Ints:
    """Samples per device and class, or per group of devices and class.

    Where samples have several labels (rows of 0 and 1), one counts for each that it has.

    >>> split = iid([0, 0], devices=2, seed=0)
    >>> class_counts(split, [[1, 1, 0], [1, 1, 0]], 3).tolist()
    [[1, 1, 0], [1, 1, 0]]
    """
    devices = len(partition)
    row_of = np.arange(devices) if groups is None else _checked_groups(groups, devices)
    if np.ndim(labels) == 2:
        found = np.zeros((int(row_of.max()) + 1, num_classes), np.int64)
        rows = np.asarray(labels)[partition.indices]
        np.add.at(found, np.repeat(row_of, partition.sizes), rows)
        return found
    codes = _checked_labels(labels, devices)[partition.indices]
    n_rows = int(row_of.max()) + 1
    cells = np.repeat(row_of, partition.sizes) * num_classes + codes
    return np.bincount(cells, minlength=n_rows * num_classes).reshape(n_rows, num_classes)


def class_densities(counts: Ints) -> Floats:
    """How samples divide over the classes; each row sums to 1 (one without any: 0).

    The paper weights class accuracies with these to get a group's accuracy.

    >>> class_densities(np.array([[3, 1], [0, 4]])).tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))


# --- by name -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """How samples are divided over devices: a name in :data:`RULES`, and its parameters."""

    name: str = "iid"
    alpha: float = 0.1
    """Of ``dirichlet``, ``rc`` and ``rc-mixed``; the others have no use for it."""
    equal: bool = True
    """Of these and ``iid``: equal shares for all, the paper's rule."""


RULES: dict[str, tuple[Callable[..., Partition], tuple[str, ...]]] = {
    "iid": (iid, ("equal",)),
    "dirichlet": (dirichlet, ("equal", "alpha")),
    "rc": (resource_correlated, ("equal", "alpha", "groups")),
    "rc-mixed": (partial(resource_correlated, mixed=True), ("equal", "alpha", "groups")),
    "by_play": (by_play, ("groups",)),
    "natural": (natural, ()),
}
"""Each with the parameters it takes."""


def check_rule(name: str) -> None:
    """Complain about a split that nobody knows."""
    if name not in RULES:
        raise InvalidPartition(
            f"no split {name!r}{nearest(name, RULES)}; known: {', '.join(RULES)}"
        )


def divide(
    data: Samples, devices: int, seed: int, rule: Rule, groups: Sequence[int] | Ints
) -> Partition:
    """Divide a split over devices; ``groups`` is the group of each device."""
    check_rule(rule.name)
    function, takes = RULES[rule.name]
    known = {"equal": rule.equal, "alpha": rule.alpha, "groups": groups}
    codes = _goes_by(data, rule.name, takes)
    return function(codes, devices, seed, **{name: known[name] for name in takes})


def _goes_by(data: Samples, name: str, takes: Collection[str]) -> ArrayLike:
    """What a rule looks at: classes where there is an alpha; owners where shares are not equal."""
    if "alpha" in takes:
        if data.facts.labels != "classes":
            raise InvalidPartition(
                f"the {name} split goes by the class of each sample, and this data set has "
                f"{data.facts.labels} instead; use iid, or natural where samples have owners"
            )
        return data.labels
    if "equal" in takes:
        return np.zeros(len(data), np.int64)
    if data.owners is None:
        raise InvalidPartition(
            f"the {name} split needs to know who owns each sample (a person, writer or play), and "
            "this data set does not say; name the column (owners), or use iid, dirichlet or rc"
        )
    return data.owners


# --- drawing -----------------------------------------------------------------------------------


def _by_class(
    labels: ArrayLike,
    group_of: Ints,
    rng: np.random.Generator,
    *,
    alpha: float,
    equal: bool,
    mixed: bool,
) -> Partition:
    """Divide each class over groups in Dirichlet proportions, and within a group evenly."""
    devices = len(group_of)
    codes = _checked_labels(labels, devices)
    if not (np.isfinite(alpha) and alpha > 0):
        raise InvalidPartition(
            f"alpha = {alpha} is no Dirichlet parameter; it must be above 0 and finite, "
            "like 0.1 (few classes per device) or 100 (nearly iid)"
        )
    group_devices = np.bincount(group_of)
    kept, remainder = _set_aside(len(codes), devices, rng, equal)
    order, group_sizes = _draw(kept, codes[kept], len(group_devices), alpha, rng)
    if mixed:
        order = _shuffled_within(order, group_sizes, rng)
    if equal:
        group_sizes = group_devices * (len(kept) // devices)
    elif (group_sizes[group_devices == 0] > 0).any():
        raise InvalidPartition(
            f"groups has no device in group {int(np.flatnonzero(group_devices == 0)[0])}, yet "
            f"group {int(group_of.max())} exists: number the groups 0, 1, … without a gap"
        )
    if not mixed:
        order = _shuffled_within(order, group_sizes, rng)
    return _deal_to_groups(order, group_sizes, group_of, remainder)


def _shuffled_within(order: Ints, sizes: Ints, rng: np.random.Generator) -> Ints:
    """Shuffle each consecutive part of ``order``; ``sizes`` are the lengths of the parts."""
    return order[_part_by_part(np.repeat(np.arange(len(sizes)), sizes), rng)]


def _part_by_part(part_of: Ints, rng: np.random.Generator) -> Ints:
    """All samples of the first part in random order, then those of the second, and so on."""
    order = shuffled(np.arange(len(part_of)), rng)
    return order[_stable_argsort(part_of[order])]


def _draw(
    samples: Ints, codes: Ints, n_parts: int, alpha: float, rng: np.random.Generator
) -> tuple[Ints, Ints]:
    """Order ``samples`` part by part, within a part class by class; with the size of each part."""
    class_sizes = np.bincount(codes)
    counts = np.stack([_apportion(int(n), n_parts, alpha, rng) for n in class_sizes])
    # `samples` arrive shuffled and the sort is stable, so which samples of a class is random too.
    by_class = samples[_stable_argsort(codes)]
    part_of = np.repeat(np.tile(np.arange(n_parts), len(class_sizes)), counts.ravel())
    return by_class[_stable_argsort(part_of)], counts.sum(axis=0)


def _apportion(n_samples: int, n_parts: int, alpha: float, rng: np.random.Generator) -> Ints:
    """How many of ``n_samples`` go to each part, in Dirichlet proportions."""
    ends = np.floor(np.cumsum(stable_random.dirichlet(alpha, n_parts, rng)) * n_samples + 0.5)
    ends[-1] = n_samples
    sizes = np.minimum(ends, n_samples).astype(np.int64)
    sizes[1:] -= sizes[:-1].copy()
    return sizes


# --- cutting -----------------------------------------------------------------------------------


def _set_aside(
    n_samples: int, devices: int, rng: np.random.Generator, equal: bool
) -> tuple[Ints, Ints]:
    """All samples in random order, less those that equal shares leave over."""
    order = shuffled(np.arange(n_samples), rng)
    n_kept = n_samples // devices * devices if equal else n_samples
    return order[:n_kept], order[n_kept:]


def _deal_to_groups(order: Ints, group_sizes: Ints, group_of: Ints, remainder: Ints) -> Partition:
    """Cut each group's part of ``order`` evenly over its devices, whatever their numbers are."""
    by_group = _stable_argsort(group_of)
    group_devices = np.bincount(group_of, minlength=len(group_sizes))
    rank = np.empty(len(group_of), np.int64)
    first = np.cumsum(group_devices) - group_devices
    rank[by_group] = np.arange(len(group_of)) - np.repeat(first, group_devices)
    share, left = np.divmod(group_sizes[group_of], group_devices[group_of])
    sizes = share + (rank < left)
    # Where each device's samples begin in `order`, which lists the devices group by group.
    begins = np.empty(len(group_of), np.int64)
    begins[by_group] = np.cumsum(sizes[by_group]) - sizes[by_group]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    positions = np.arange(offsets[-1]) + np.repeat(begins - offsets[:-1], sizes)
    return Partition(order[positions], offsets, remainder.copy())


def _deal_parts(group_of_sample: Ints, group_of: Ints, rng: np.random.Generator) -> Partition:
    """Shuffle the samples of each group, and cut them evenly over its devices."""
    order = _part_by_part(group_of_sample, rng)
    sizes = np.bincount(group_of_sample, minlength=int(group_of.max()) + 1)
    return _deal_to_groups(order, sizes, group_of, order[:0])


def _fill_evenly(sizes: Ints, target: Floats, rng: np.random.Generator) -> Ints:
    """Give each item, in random order, to the bin that lacks the largest part of its target."""
    filled = np.zeros(len(target))
    bin_of = np.empty(len(sizes), np.int64)
    for item in shuffled(np.arange(len(sizes)), rng):
        fullness = np.where(target > 0, filled / np.maximum(target, 1e-9), np.inf)
        bin_of[item] = np.argmin(fullness)
        filled[bin_of[item]] += sizes[item]
    return bin_of


def _stable_argsort(codes: Ints) -> Ints:
    # NumPy sorts 16-bit integers by radix, in a third of the time.
    small = codes.astype(np.uint16) if len(codes) and codes.max() < 2**16 else codes
    return np.argsort(small, kind="stable")


# --- checking ----------------------------------------------------------------------------------


def _checked_labels(labels: ArrayLike, devices: int, what: str = "label") -> Ints:
    codes = np.asarray(labels)
    if codes.ndim != 1 or codes.dtype.kind not in "iu" or (len(codes) and codes.min() < 0):
        low = f", smallest {codes.min()}" if codes.dtype.kind in "iu" and codes.size else ""
        raise InvalidPartition(
            f"expected one {what} per sample as integers from 0, in one dimension; "
            f"got {codes.dtype} of shape {codes.shape}{low}"
        )
    if not 1 <= devices <= len(codes):
        raise InvalidPartition(
            f"{len(codes)} samples cannot be split over {devices} devices, each needs at least "
            f"one; use between 1 and {len(codes)} devices"
        )
    return codes.astype(np.int64, copy=False)


def _checked_groups(groups: Sequence[int] | Ints, devices: int) -> Ints:
    group_of = np.asarray(groups)
    if group_of.shape != (devices,) or group_of.dtype.kind not in "iu" or group_of.min() < 0:
        raise InvalidPartition(
            f"groups must give the group of each of the {devices} devices as integers from 0; "
            f"got {group_of.dtype} of shape {group_of.shape}"
        )
    return group_of.astype(np.int64, copy=False)
