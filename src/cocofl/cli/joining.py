"""``cocofl flower device``: from a bare machine to a device of a federation."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from cocofl.budget import Budget, bytes_text
from cocofl.cli.deploying import Insecure, RootCertificates, join
from cocofl.cli.machine import kernels, processor
from cocofl.cli.printing import check_writable
from cocofl.cli.profiling import measure
from cocofl.cli.running import needs_flower
from cocofl.errors import InvalidSetting, OtherHardware
from cocofl.fl.select import feasible, nothing_fits
from cocofl.named import vouch_for
from cocofl.profiling import ProfileTable
from cocofl.profiling.subject import Settings

CLIENT_BYTES = 0.45e9
"""What a client's processes take before they train, at most (docs/notebook/reach.md)."""
MOST_FRACTION = 2.0
"""Of full training; who gives more has left out the unit."""
NODE_FILE, TABLE, KEY = "node.toml", "table.json", "key"


def device(
    superlink: Annotated[str, typer.Option(help="The server's address, HOST:PORT.")],
    folder: Annotated[Path, typer.Argument(help="Where table, key and node file are kept.")] = Path(
        "device"
    ),
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    model: Annotated[
        str | None, typer.Option(help="What will be trained: a name, or package.module:factory.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples per mini-batch, as on the server.")] = 32,
    classes: Annotated[int | None, typer.Option(help="Outputs of the model.")] = None,
    threads: Annotated[int | None, typer.Option(help="Default: all of this machine.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="A table that `cocofl profile` made here before.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where this device's data is.")] = None,
    samples: Annotated[int | None, typer.Option(help="How many it has, to say what fits.")] = None,
    time: Annotated[str | None, typer.Option(help="0.33 of full, or 60s per round.")] = None,
    memory: Annotated[str | None, typer.Option(help="0.33 of full, or 200MB.")] = None,
    upload: Annotated[str | None, typer.Option(help="0.7 of full, or 2MB.")] = None,
    trust: Annotated[
        str, typer.Option(help="Modules that the server may name; that of --model counts.")
    ] = "",
    write_only: Annotated[
        bool, typer.Option("--write-only", help="Prepare everything, and do not join.")
    ] = False,
) -> None:
    """Make this machine a device: look at it, measure the model, write its file, and join.

    What is there already is kept: a key, and a table if none is named. The node file is new.

    Example: cocofl flower device --superlink fl.example.org:8000 --root-certificates ca.crt
    """
    vouch_for(model or "")
    folder = folder.absolute()
    check_writable(folder / NODE_FILE, "folder")
    # What is mistyped is said before minutes of measuring.
    certificates = "" if root_certificates is None else str(root_certificates.absolute())
    needs_flower("node_file").NodeFile(superlink, certificates, insecure=insecure)
    check_given(certificates, data_dir, {"time": time, "memory": memory, "upload": upload})
    tell_of_machine()
    cores = os.cpu_count() or 1 if threads is None else threads
    subject = None if model is None else Settings(model, batch, classes, threads=cores)
    config = node_config(model, trust, data_dir, {"time": time, "memory": memory, "upload": upload})
    measured = table_of(folder, subject, table)
    if measured is not None:
        config["profile"] = str(measured.absolute())
    tell_what_fits(config, samples)
    key = "" if insecure else str(key_in(folder))
    file = needs_flower("node_file").NodeFile(superlink, certificates, key, insecure, config)
    file.save(folder / NODE_FILE)
    again = f"cocofl flower node --file {folder / NODE_FILE}"
    print(f"file: {folder / NODE_FILE} holds all of this, for you to read and change")
    if write_only:
        print(f"join with: {again}")
        return
    print(f"joining {superlink}; Ctrl-C leaves, and this joins again: {again}")
    join(file.words())


def check_given(certificates: str, data_dir: Path | None, budget: Mapping[str, str | None]) -> None:
    """Refuse places that are not there, and limits that nobody means."""
    if certificates:
        if not Path(certificates).is_file():
            raise InvalidSetting(f"there is no file {certificates}; copy ca.crt from the server")
        if b"BEGIN CERTIFICATE" not in Path(certificates).read_bytes():
            raise InvalidSetting(
                f"{certificates} holds no certificate (PEM); copy ca.crt from the server"
            )
    if data_dir is not None and not data_dir.is_dir():
        raise InvalidSetting(f"there is no folder {data_dir}; --data-dir is where the data is")
    given = Budget.parse(**budget, samples=1)
    for name, unit in (("time", "s"), ("memory", "MB"), ("upload", "MB")):
        if MOST_FRACTION < (fraction := getattr(given, name)) < math.inf:
            raise InvalidSetting(
                f"--{name} {budget[name]} is {fraction:g} times what training everything takes; "
                f"give a unit ({budget[name]}{unit}), a fraction like 0.5, or nothing"
            )


def tell_of_machine() -> None:
    """What the doctor says about computing here, and whether there is memory for a client."""
    cores, features, *_ = processor()
    print(f"machine: {cores.found}; {features.found}")
    names = [one.what.removeprefix("kernel ") for one in kernels() if one.state == "good"]
    print(f"int8: can be computed with {', '.join(names)}")
    free = free_bytes()
    if free is not None:
        needs = f"the client takes {bytes_text(CLIENT_BYTES)} before it trains"
        short = ", which is not enough: close something, or add swap" * (free < CLIENT_BYTES)
        print(f"memory: {bytes_text(free)} free; {needs}{short}")


def free_bytes() -> int | None:
    """Memory that a new process could have; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = {name: amount for name, _, amount in (line.partition(":") for line in lines)}
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def node_config(
    model: str | None, trust: str, data_dir: Path | None, budget: Mapping[str, str | None]
) -> dict[str, float | str]:
    """What the device has, in the words of a node config."""
    config: dict[str, float | str] = {}
    own = [model.partition(":")[0]] if model is not None and ":" in model else []
    if modules := dict.fromkeys([*trust.split(), *own]):
        config["trust"] = " ".join(modules)
    if data_dir is not None:
        config["data-dir"] = str(data_dir.absolute())
    for name, text in budget.items():
        if text is not None:
            # A number is a fraction; an amount is a text.
            config[name] = float(text) if text.replace(".", "", 1).isdecimal() else text
    return config


def table_of(folder: Path, subject: Settings | None, given: Path | None) -> Path | None:
    """The table to plan with: named, there already, or new; None without a model."""
    path = folder / TABLE if given is None else given
    if given is None and not path.exists():
        if subject is None:
            print("table: none, since no --model is named; costs are counted, not measured")
            return None
        print(f"table: measuring what parts of {subject.model} cost here; this takes minutes")
        path.parent.mkdir(parents=True, exist_ok=True)
        measure(subject, path, fast=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OtherHardware)
        try:
            table = ProfileTable.load(path)
        except OtherHardware as warning:
            raise InvalidSetting(f"{warning}; remove it, and it is measured here") from warning
    if subject is not None and table.model != subject.model:
        raise InvalidSetting(
            f"{path} is a table of {table.model}, but --model is {subject.model}; name another "
            "folder, or remove the table"
        )
    print(f"table: {table.describe()}")
    return path


def tell_what_fits(config: Mapping[str, float | str], samples: int | None) -> None:
    """What the device can train with what it has; an error if that is nothing."""
    budget = needs_flower("settings").node_budget(config, samples or 1)  # complains, if it must
    if "profile" not in config:
        print(f"budget: {budget if samples else 'as given'}; of what, is seen in the first round")
        return
    table = ProfileTable.load(str(config["profile"]))
    # How many samples a round has is known to the device when it trains.
    timed = samples is not None or not isinstance(config.get("time"), str)
    if not timed:
        budget = replace(budget, time_s=math.inf)
    spans = feasible(table, budget)
    if not spans:
        raise nothing_fits(table, budget)
    open_end = "" if timed else f"; how much of that in {config['time']}, --samples would tell"
    print(f"budget: {budget}: {len(spans)} of {len(table)} spans fit{open_end}")


def key_in(folder: Path) -> Path:
    """The device's key, made if it has none, and what to do with its public half."""
    path = folder / KEY
    made = not path.exists()
    if made:
        folder.mkdir(parents=True, exist_ok=True)
        needs_flower("keys").new_device_key(path)
    print(
        f"key: {'made' if made else 'found'} {path}; the server must know {path}.pub: "
        f"flwr supernode register {KEY}.pub NAME-OF-THE-SUPERLINK"
    )
    return path
