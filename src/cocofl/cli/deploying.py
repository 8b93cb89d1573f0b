"""``cocofl flower``: the same algorithm over a real network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from cocofl.cli.printing import check_writable
from cocofl.cli.running import Changes, File, needs_flower, read_experiment
from cocofl.errors import InvalidExperiment, InvalidSetting
from cocofl.fl.metrics import metric
from cocofl.runlog import RoundRecord

RootCertificates = Annotated[Path | None, typer.Option(help="The server's authority.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS.")]
flower_app = typer.Typer(
    name="flower",
    help="A deployment with Flower: tried on this machine, or as an app.",
    no_args_is_help=True,
)


@flower_app.command()
def up(
    file: File = None,
    changes: Changes = None,
    supernodes: Annotated[int, typer.Option(min=1, help="How many devices.")] = 3,
    secure: Annotated[
        bool, typer.Option("--secure", help="With TLS, and a key for every SuperNode.")
    ] = False,
    out: Annotated[Path, typer.Option(help="A new folder for run, app, logs and keys.")] = Path(
        "runs/flower"
    ),
) -> None:
    """Try a deployment on this machine: a SuperLink, SuperNodes, a run, and nothing left behind.

    Example: cocofl flower up --supernodes 3 --set rounds=3
    """
    experiment = read_experiment(file, changes)
    trial = needs_flower("trial")
    needs_flower("settings").check_experiment(experiment)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidExperiment(f"{out} exists already; name another folder with --out")
    check_writable(out / "run", "--out")
    print(f"starting a SuperLink and {supernodes} SuperNodes; their logs are in {out}/network")
    headline = metric(experiment.evaluation.metrics[0]).facts

    def on_round(record: RoundRecord) -> None:
        spans = ", ".join(f"{one.work or ''} {one.fate}".strip() for one in record.devices)
        print("  ".join([f"round {record.round}: {spans}", *headline.found_in(record.scores)]))
        sys.stdout.flush()

    done = trial.try_out(experiment, out, supernodes=supernodes, secure=secure, on_round=on_round)
    print("; ".join([*headline.found_in(done.final.scores), f"run folder: {done.path}"]))


@flower_app.command()
def app(
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    file: File = None,
    changes: Changes = None,
) -> None:
    """Write a Flower app that runs an experiment, ready for `flwr run`.

    Example: cocofl flower app my-app experiment.toml
    """
    experiment = read_experiment(file, changes)
    settings = needs_flower("settings")
    settings.check_experiment(experiment)
    check_writable(folder / "pyproject.toml", "folder")
    settings.write_app(folder, settings.run_config(experiment, settings.Deployment()))
    print(f"{folder}/pyproject.toml: put your own modules beside it, then: flwr run {folder}")


@flower_app.command()
def node(
    file: Annotated[
        Path | None, typer.Option(help="What `cocofl flower device` wrote, instead of the others.")
    ] = None,
    superlink: Annotated[str, typer.Option(help="The server's address, HOST:PORT.")] = "",
    node_config: Annotated[str, typer.Option(help="What this device has: key=value …")] = "",
    root_certificates: RootCertificates = None,
    auth_supernode_private_key: Annotated[
        Path | None, typer.Option(help="This device's key, which the server knows.")
    ] = None,
    insecure: Insecure = False,
) -> None:
    """Take part as a device: its network stays in memory from round to round.

    Example: cocofl flower node --file device/node.toml
    """
    if file is not None:
        if superlink or node_config or root_certificates or auth_supernode_private_key or insecure:
            raise InvalidSetting(f"{file} says all of it: give --file alone, or only the others")
        join(needs_flower("node_file").NodeFile.load(file).words())
    words = ["--superlink", superlink, "--node-config", node_config]
    if root_certificates is not None:
        words += ["--root-certificates", str(root_certificates)]
    if auth_supernode_private_key is not None:
        words += ["--auth-supernode-private-key", str(auth_supernode_private_key)]
    if not superlink:
        raise InvalidSetting("no server is named: give --superlink HOST:PORT, or --file")
    join(words + ["--insecure"] * insecure)


def join(words: list[str]) -> NoReturn:
    """Become a SuperNode: this process, with PyTorch and all, is replaced."""
    program = [*needs_flower("loopback").NODE_PROGRAM, *words]
    sys.stdout.flush()
    os.execv(program[0], program)
