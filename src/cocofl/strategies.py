"""All that a strategy of one's own is made of. ``docs/guides/extend.md`` shows examples."""

from cocofl.budget import Budget
from cocofl.fl.arrival import Arrival
from cocofl.fl.federation import Situation
from cocofl.fl.merge import Accumulator, Mean, Merge, ServerOptimizer
from cocofl.fl.rules import Ballot, Rules
from cocofl.fl.select import feasible, feasible_widths, maximal, select
from cocofl.fl.spans import SpanWork
from cocofl.fl.stacked import NotStacked, StackedNetworks, StackedWork
from cocofl.fl.state import Contribution, ServerState, Tensors
from cocofl.fl.strategies import STRATEGIES, Plan, Strategy, StrategyFacts, Tables, declares
from cocofl.fl.strategies.base import steps_in_time, time_share, without_deadline
from cocofl.fl.trainer import Task, Trainer, Work
from cocofl.fl.widths import OrderedWork, WidthWork
from cocofl.local_rule import LocalRule, LocalStep
from cocofl.span import Blocks, Span

__all__ = [
    "STRATEGIES",
    "Accumulator",
    "Arrival",
    "Ballot",
    "Blocks",
    "Budget",
    "Contribution",
    "LocalRule",
    "LocalStep",
    "Mean",
    "Merge",
    "NotStacked",
    "OrderedWork",
    "Plan",
    "Rules",
    "ServerOptimizer",
    "ServerState",
    "Situation",
    "Span",
    "SpanWork",
    "StackedNetworks",
    "StackedWork",
    "Strategy",
    "StrategyFacts",
    "Tables",
    "Task",
    "Tensors",
    "Trainer",
    "WidthWork",
    "Work",
    "declares",
    "feasible",
    "feasible_widths",
    "maximal",
    "select",
    "steps_in_time",
    "time_share",
    "without_deadline",
]
