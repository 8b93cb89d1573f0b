"""One experiment, put together and run; and many of them."""

from cocofl.experiment.engines import executor_for, machine_plan, remember_plan
from cocofl.experiment.runs import (
    Run,
    Spread,
    Watch,
    evaluate_run,
    in_short,
    model_with,
    open_folder,
    simulate,
    simulate_batch,
)
from cocofl.experiment.setup import Setup, load_data, rounds_of

__all__ = [
    "Run",
    "Setup",
    "Spread",
    "Watch",
    "evaluate_run",
    "executor_for",
    "in_short",
    "load_data",
    "machine_plan",
    "model_with",
    "open_folder",
    "remember_plan",
    "rounds_of",
    "simulate",
    "simulate_batch",
]
