"""One experiment, put together and run; and many of them."""

from cocofl.experiment.batch_runs import batch_groups, in_short, simulate_batch
from cocofl.experiment.engines import engine_kind, machine_plan, make_executor, remember_plan
from cocofl.experiment.runs import Run, Spread, evaluate_run, model_with, open_folder, simulate
from cocofl.experiment.setup import Setup, load_data, rounds_of

__all__ = [
    "Run",
    "Setup",
    "Spread",
    "batch_groups",
    "engine_kind",
    "evaluate_run",
    "in_short",
    "load_data",
    "machine_plan",
    "make_executor",
    "model_with",
    "open_folder",
    "remember_plan",
    "rounds_of",
    "simulate",
    "simulate_batch",
]
