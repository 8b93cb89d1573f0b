"""``cocofl data``: data sets, and how they are divided over devices."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from cocofl import data
from cocofl.cli.printing import (
    Json,
    check_writable,
    key_values,
    print_json,
    print_text_table,
    starting,
)
from cocofl.named import vouch_for
from cocofl.report.sources import Holdings, printable
from cocofl.report.tables import TextTable

data_app = typer.Typer(
    name="data", help="Data sets, and how they are divided over devices.", no_args_is_help=True
)

GROUPS_OF_THREE = ("strong", "medium", "weak")
DataDir = Annotated[
    Path | None,
    typer.Option(help="A folder of data sets in the Hub's layout; default: $COCOFL_DATA."),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", help="key=value of data.options, like labels=class; repeatable."),
]


@data_app.command("list")
def data_list(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List the data sets: size, classes, and whether they are here or how to get them.

    Example: cocofl data list --data-dir ~/datasets
    """
    listings = [data.listing(name, data_dir=data_dir) for name in data.REGISTRY]
    if as_json:
        print_json([asdict(listing) for listing in listings])
        return
    place = {"ready": "ready", "here": "here", "hub": "on the Hub", "missing": "not here"}
    lines = []
    for entry in listings:
        counts = (entry.train_samples, entry.test_samples, entry.num_classes)
        spaced = (f"{count:,}".replace(",", " ") for count in counts)
        lines.append((entry.name, entry.task, *spaced, f"{place[entry.state]}: {entry.place}"))
    header = ("name", "task", "train", "test", "classes", "available")
    print_text_table(TextTable("", header, tuple(lines)))


@data_app.command("show")
def data_show(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `data list`, a path, or package.module:function.",
            autocompletion=starting(data.REGISTRY),
        ),
    ],
    split: Annotated[
        str, typer.Option(help="iid, dirichlet, rc, rc-mixed, by_play or natural.")
    ] = "rc",
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet distribution.")] = 0.1,
    devices: Annotated[int, typer.Option(help="How many devices.")] = 100,
    groups: Annotated[int, typer.Option(help="How many equally large groups of them.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the split and the groups.")] = 0,
    unequal: Annotated[bool, typer.Option("--unequal", help="Keep the drawn sizes.")] = False,
    preset: Annotated[str, typer.Option(help="standard, or paper: what it uses.")] = "standard",
    data_dir: DataDir = None,
    options: Options = None,
    out: Annotated[Path | None, typer.Option(help="Default: NAME-SPLIT.png.")] = None,
    as_json: Json = False,
) -> None:
    """Show who holds what: a bubble chart as PNG, and the class densities of each group.

    Example: cocofl data show digits --split rc --alpha 0.1 --devices 30
    """
    # Drawing takes longer to import than everything else here.
    from cocofl.report.drawing import save_bubble_chart  # noqa: PLC0415

    path = out or Path(f"{re.sub(r'[:/]', '.', name)}-{split}.png")
    check_writable(path, "--out")
    vouch_for(name)
    said = key_values(options, "--option", "labels=class")
    train = data.load(name, data_dir=data_dir, preset=preset, options=said).train
    group_of = data.partition.equal_groups(devices, groups, seed)
    rule = data.Rule(split, alpha, not unequal)
    partition = data.divide(train, devices, seed, rule, group_of)
    held = Holdings.of(train, partition, group_of, _group_names(groups), seed)
    with_alpha = f", alpha {alpha:g}" if split in ("dirichlet", "rc", "rc-mixed") else ""
    title = f"{name}: {split}{with_alpha}, {devices} devices, seed {seed}"
    save_bubble_chart(path, held, title)
    low, high = int(partition.sizes.min()), int(partition.sizes.max())
    if as_json:
        print_json(
            {
                "name": name,
                "rule": asdict(rule),
                "samples": len(train),
                "devices": devices,
                "samples_per_device": [low, high],
                "remainder": len(partition.remainder),
                "class_names": train.facts.class_names,
                "densities": _densities(held),
                "chart": str(path),
            }
        )
    else:
        print_text_table(_density_table(held, title))
        own = f"{low if low == high else f'{low} to {high}'} samples each"
        print(f"{devices} devices with {own}; {len(partition.remainder)} left over.\nChart: {path}")


def _group_names(groups: int) -> tuple[str, ...]:
    return GROUPS_OF_THREE if groups == 3 else tuple(f"group {one}" for one in range(groups))


def _densities(held: Holdings) -> dict[str, list[float]]:
    found = data.partition.class_densities(_group_counts(held)).tolist()
    return dict(zip(held.group_names, found, strict=True))


def _group_counts(held: Holdings) -> NDArray[np.int64]:
    groups = range(len(held.group_names))
    return np.stack([held.counts[held.group_of == group].sum(axis=0) for group in groups])


def _density_table(held: Holdings, title: str) -> TextTable:
    """Of each class, its share in each group, and who has most of it."""
    counts = _group_counts(held)
    totals, tops = counts.sum(axis=0), counts.argmax(axis=0)
    columns = {
        "class": [printable(name) for name in held.class_names],
        **{
            group: [f"{share:.1%}" for share in shares]
            for group, shares in _densities(held).items()
        },
        "most of it is on": [
            f"{held.group_names[top]} ({counts[top, i] / totals[i]:.0%})" if totals[i] else "nobody"
            for i, top in enumerate(tops)
        ],
    }
    return TextTable.of(title, columns)
