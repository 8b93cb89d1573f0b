"""Data sets, ready to train on, and who holds which part of them.

>>> from cocofl.data import load, partition
>>> data = load("digits")                                                        # doctest: +SKIP
>>> groups = partition.equal_groups(30, n_groups=3, seed=0)                      # doctest: +SKIP
>>> split = partition.resource_correlated(                                       # doctest: +SKIP
...     data.train.labels, 30, seed=0, alpha=0.1, groups=groups)
"""

from cocofl.data import partition
from cocofl.data.given import UserData
from cocofl.data.partition import RULES, Partition, Rule, divide
from cocofl.data.registry import REGISTRY, DataSet, Listing, listing, load
from cocofl.data.samples import Facts, Samples, normalise, open_samples

__all__ = [
    "REGISTRY",
    "RULES",
    "DataSet",
    "Facts",
    "Listing",
    "Partition",
    "Rule",
    "Samples",
    "UserData",
    "divide",
    "listing",
    "load",
    "normalise",
    "open_samples",
    "partition",
]
