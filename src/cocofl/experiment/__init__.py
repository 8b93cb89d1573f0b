"""One experiment, put together and run; and many of them."""

from cocofl.experiment.engines import executor_for, machine_plan, places_of, remember_plan
from cocofl.experiment.groups import Watch, in_short
from cocofl.experiment.runs import (
    Run,
    Spread,
    evaluate_run,
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
    "places_of",
    "remember_plan",
    "rounds_of",
    "simulate",
    "simulate_batch",
]
