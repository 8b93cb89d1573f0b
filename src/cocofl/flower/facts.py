"""What devices must know of the server's data, so that theirs means the same.

A device may lack classes, and its pictures may be darker than others: labels and normalisation
are the server's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cocofl.data import DataSet, Split


def shared_facts(dataset: DataSet) -> dict[str, Any]:
    """What the server tells devices about the data."""
    facts = dataset.facts
    return {
        "class_names": list(facts.class_names),
        "mean": list(facts.mean),
        "std": list(facts.std),
    }


def with_shared_facts(dataset: DataSet, facts: Mapping[str, Any]) -> DataSet:
    """A device's data, read as the server's is."""
    names, mean, std = (tuple(facts[name]) for name in ("class_names", "mean", "std"))

    def read_alike(split: Split) -> Split:
        alike = replace(split.facts, class_names=names, mean=mean, std=std)
        return replace(split, facts=alike)

    return replace(dataset, train=read_alike(dataset.train), test=read_alike(dataset.test))
