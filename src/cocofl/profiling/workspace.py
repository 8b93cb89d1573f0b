"""What all measurements of one table share: the server's state and the kernel plan, as files.

A device gets its weights and scales from the server, so every configuration is measured with
scales that were measured before, and all use the same int8 kernels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.files import write_text
from cocofl.freeze import VARIANTS, KernelPlan, State, backend_names, chain_state, freeze
from cocofl.profiling.subject import Inputs, Subject, training_step
from cocofl.profiling.table import METHODS, Configuration, Cost, ProfileTable, spans_with_head
from cocofl.span import Blocks, Span, all_spans

# The paper's 50 steps, and the levels its baselines use: FjORD's, and those of Transformers.
LEVELS = (0.125, 0.2, 0.4, 0.6, 0.625, 0.8, 0.8125)
STEPS = tuple(round(float(width), 4) for width in np.linspace(0.1, 1.0, 50))
WIDTHS = tuple(sorted({*STEPS, *LEVELS}))
_STATE, _PLAN, _SETTINGS = "state.npz", "plan.json", "settings.json"


@dataclass(frozen=True)
class Settings(Subject):
    """What is profiled, and how."""

    method: str = "span"
    variant: str = "qff"
    backend: str = "auto"
    threads: int = 1
    head: bool = False
    """Whether the classifier, the last block, is trained beside every span."""

    def __post_init__(self) -> None:
        # From JSON pairs come as lists.
        object.__setattr__(self, "options", tuple((name, value) for name, value in self.options))
        for what, value, choices in (
            ("method", self.method, METHODS),
            ("variant", self.variant, VARIANTS),
            ("backend", self.backend, backend_names()),
        ):
            if value not in choices:
                raise InvalidSetting(
                    f"unknown {what} {value!r}; expected one of {', '.join(choices)}"
                )
        if self.threads < 1:
            raise InvalidSetting(f"threads is {self.threads}; expected at least 1")

    @property
    def integers(self) -> bool:
        """Whether frozen blocks are computed in int8."""
        return self.method == "span" and self.variant == "qff"

    def spans(self, n_blocks: int) -> list[Blocks]:
        """All spans, alone or each with the classifier."""
        return spans_with_head(n_blocks) if self.head else [*all_spans(n_blocks)]

    def table(
        self, costs: Mapping[Configuration, Cost], n_blocks: int, **facts: Any
    ) -> ProfileTable:
        """What was found of all configurations; six digits of a time are more than it is worth."""
        spans = self.method == "span"
        known = {
            "model": self.model,
            "method": self.method,
            "variant": self.variant if spans else "",
            "backend": self.backend if spans else "",
            "batch": self.batch,
        }
        rows = {key: cost._replace(step_s=six_digits(cost.step_s)) for key, cost in costs.items()}
        return ProfileTable.from_costs(rows, n_blocks=n_blocks, **(known | facts))


def six_digits(seconds: float) -> float:
    """As many digits as a table has."""
    return float(f"{seconds:.6g}")


def interpolated(costs: Mapping[float, Cost]) -> dict[Configuration, Cost]:
    """The costs of all widths from those of some: they grow smoothly in between."""
    known = sorted(costs)
    columns = [
        np.interp(WIDTHS, known, [getattr(costs[width], name) for width in known]).tolist()
        for name in ("step_s", "tensor_bytes", "upload_bytes")
    ]
    rows = zip(WIDTHS, *columns, strict=True)
    return {width: Cost(step, None, round(peak), round(up)) for width, step, peak, up in rows}


def measured_state(chain: BlockChain, inputs: Inputs) -> State:
    """The chain's weights after a few steps, with the scales that training measured."""
    net = freeze(chain, Span(0, len(chain)), variant="f")
    step = training_step(net, inputs)
    step()
    net.measure_scales()
    step()
    return chain_state(chain) | net.update().tensors


def kernel_plan(settings: Settings, chain: BlockChain, state: State) -> KernelPlan:
    """The kernel of every map: each block once frozen, once passing."""
    plan, n = KernelPlan(), len(chain)
    if settings.integers and n > 1:
        for span in (Span(n - 1, n), Span(0, 1)):
            freeze(chain, span, backend=settings.backend, state=state, plan=plan)
    return plan


def prepare(folder: Path, settings: Settings) -> None:
    """Write the workspace; what is there already stays, so that a resumed sweep uses the same."""
    if (folder / _SETTINGS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = KernelPlan()
    if settings.method == "span":
        chain, inputs = settings.chain()
        state = measured_state(chain, inputs)
        arrays: dict[str, Any] = {key: t.numpy() for key, t in state.items()}
        np.savez(folder / _STATE, **arrays)
        plan = kernel_plan(settings, chain, state)
    plan.save(folder / _PLAN)
    write_text(folder / _SETTINGS, json.dumps(asdict(settings)) + "\n")


def load_settings(folder: Path) -> Settings:
    """What the workspace was prepared for."""
    return Settings(**json.loads((folder / _SETTINGS).read_text()))


def load_plan(folder: Path) -> KernelPlan:
    """The plan, to be obeyed; a map it lacks is chosen anew."""
    return KernelPlan.load(folder / _PLAN, fixed=False)


def load_state(folder: Path) -> State:
    """The server's state."""
    with np.load(folder / _STATE) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
