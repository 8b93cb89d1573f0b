"""``cocofl data``: data sets, and how they are divided over devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table

from cocofl import data
from cocofl.cli.outputs import check_writable
from cocofl.cli.printing import Json, print_json, print_table, right, starting
from cocofl.named import vouch_for

data_app = typer.Typer(
    help="Data sets, and how they are divided over devices.", no_args_is_help=True
)

DataDir = Annotated[
    Path | None,
    typer.Option(help="A folder of data sets in the Hub's layout; default: $COCOFL_DATA."),
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
    table = Table("name", "task", right("train"), right("test"), right("classes"), "available")
    for entry in listings:
        counts = (entry.train_samples, entry.test_samples, entry.num_classes)
        place = {"ready": "ready", "here": "here", "hub": "on the Hub", "missing": "not here"}
        table.add_row(
            entry.name,
            entry.task,
            *(f"{count:,}".replace(",", " ") for count in counts),
            f"{place[entry.state]}: {entry.place}",
        )
    print_table(table)


@data_app.command("show")
def data_show(
    name: Annotated[
        str,
        typer.Argument(
            help="A name from `data list`, or package.module:function.",
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
    out: Annotated[Path | None, typer.Option(help="Default: NAME-SPLIT.png.")] = None,
    as_json: Json = False,
) -> None:
    """Show who holds what: a bubble chart as PNG, and the class densities of each group.

    Example: cocofl data show digits --split rc --alpha 0.1 --devices 30
    """
    # Drawing takes longer to import than everything else here.
    from cocofl.report.bubbles import save_bubble_chart  # noqa: PLC0415

    path = out or Path(f"{name.replace(':', '.')}-{split}.png")
    check_writable(path, "--out")
    vouch_for(name)
    train = data.load(name, data_dir=data_dir, preset=preset).train
    group_of = data.partition.equal_groups(devices, groups, seed)
    rule = data.Rule(split, alpha, not unequal)
    partition = data.divide(train, devices, seed, rule, group_of)
    counts = data.partition.class_counts(partition, train.labels, train.facts.num_classes)
    group_names = _group_names(groups)
    with_alpha = f", alpha {alpha:g}" if split in ("dirichlet", "rc", "rc-mixed") else ""
    title = f"{name}: {split}{with_alpha}, {devices} devices, seed {seed}"
    save_bubble_chart(path, counts, group_of, train.facts.class_names, group_names, title)
    per_group = np.stack([counts[group_of == group].sum(axis=0) for group in range(groups)])
    densities = data.partition.class_densities(per_group)
    if as_json:
        summary = {
            "name": name,
            "rule": asdict(rule),
            "samples": len(train),
            "devices": devices,
            "samples_per_device": [int(partition.sizes.min()), int(partition.sizes.max())],
            "remainder": len(partition.remainder),
            "class_names": train.facts.class_names,
            "densities": dict(zip(group_names, densities.tolist(), strict=True)),
            "chart": str(path),
        }
        print_json(summary)
        return
    print_table(_density_table(train.facts.class_names, group_names, per_group, title))
    print(f"{devices} devices with {_sizes(partition)} samples each;", end=" ")
    print(f"{len(partition.remainder)} left over.")
    print(f"Chart: {path}")


def _density_table(
    classes: Sequence[str], groups: Sequence[str], counts: NDArray[np.int64], title: str
) -> Table:
    """Of each class, its share in each group, and who has most of it."""
    table = Table("class", *(right(group) for group in groups), "most of it is on", title=title)
    densities = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    for label, name in enumerate(classes):
        total, top = int(counts[:, label].sum()), int(np.argmax(counts[:, label]))
        most = f"{groups[top]} ({counts[top, label] / total:.0%})" if total else "nobody"
        shown = name if name.isprintable() and name.strip() else repr(name)
        table.add_row(escape(shown), *(f"{share:.1%}" for share in densities[:, label]), most)
    return table


def _sizes(partition: data.Partition) -> str:
    low, high = int(partition.sizes.min()), int(partition.sizes.max())
    return str(low) if low == high else f"{low} to {high}"


def _group_names(n_groups: int) -> list[str]:
    if n_groups == 3:
        return ["strong", "medium", "weak"]
    return [f"group {group}" for group in range(n_groups)]
