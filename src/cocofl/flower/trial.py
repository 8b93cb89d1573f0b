"""A first try: an experiment over real processes and sockets, all on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cocofl.config import Experiment
from cocofl.experiment import Run
from cocofl.flower.loopback import DeploymentFailed, Loopback
from cocofl.flower.settings import Deployment, run_config, write_app
from cocofl.runlog import RoundRecord, RunFolder

# A strong, a medium and a weak device, and so on in turn.
BUDGETS = (1.0, 2 / 3, 1 / 3)
_ASK_S = 15.0


def try_out(
    experiment: Experiment,
    folder: Path,
    *,
    supernodes: int = 3,
    secure: bool = False,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
) -> Run:
    """Start a SuperLink and SuperNodes, run the experiment on them, and end them again."""
    settings = Deployment(nodes=supernodes, folder=str((folder / "run").absolute()))
    app = write_app(folder / "app", run_config(experiment, settings))
    with Loopback(folder / "network", secure=secure) as network:
        for number in range(supernodes):
            budget = BUDGETS[number % len(BUDGETS)]
            node: dict[str, float | str] = {
                "partition-id": number,
                "num-partitions": supernodes,
                **dict.fromkeys(("time", "memory", "upload"), budget),
            }
            if own := experiment.names():
                node["trust"] = " ".join(own)
            key = network.new_key(f"node{number}") if secure else None
            network.start_node(f"supernode{number}", node, key=key)
        run_id = network.submit(app)
        await_run(network, run_id, Path(settings.folder), on_round)
    return Run.open(settings.folder)


def await_run(
    network: Loopback,
    run_id: int,
    path: Path,
    on_round: Callable[[RoundRecord], None] = lambda _: None,
) -> None:
    """Wait until a run is complete, telling of each round; an error if it ends otherwise."""
    folder = RunFolder(path)
    told, ask_at = 0, time.monotonic() + _ASK_S
    while True:
        complete = folder.is_complete
        for record in folder.rounds()[told:]:
            on_round(record)
            told += 1
            ask_at = time.monotonic() + _ASK_S  # a run that gets on need not be asked how it is
        if complete:
            return
        if time.monotonic() > ask_at:
            status = network.status(run_id)
            if status.startswith("finished") and not folder.is_complete:
                raise DeploymentFailed(
                    f"the run ended as {status} after {told} rounds: {network.log(run_id)[-2000:]}"
                )
            ask_at = time.monotonic() + _ASK_S
        time.sleep(0.3)
