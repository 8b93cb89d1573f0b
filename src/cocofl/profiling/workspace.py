"""What all measurements of one table share: the server's state and the kernel plan, as files.

A device gets its weights and scales from the server, so every configuration is measured with
scales that were measured before, and all use the same int8 kernels.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cocofl.chain import BlockChain
from cocofl.errors import InvalidSetting
from cocofl.freeze import VARIANTS, KernelPlan, State, backend_names, chain_state, freeze
from cocofl.profiling.subject import Inputs, Subject, training_step
from cocofl.profiling.table import METHODS, write_whole
from cocofl.span import Span

_STATE, _PLAN, _SETTINGS = "state.npz", "plan.json", "settings.json"


@dataclass(frozen=True)
class Settings:
    """What is profiled, and how."""

    model: str
    method: str = "span"
    variant: str = "qff"
    backend: str = "auto"
    batch: int = 32
    threads: int = 1
    num_classes: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
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
    def subject(self) -> Subject:
        """The model and its mini-batch."""
        return Subject(self.model, self.batch, self.num_classes, self.options)

    @property
    def integers(self) -> bool:
        """Whether frozen blocks are computed in int8."""
        return self.method == "span" and self.variant == "qff"


def measured_state(chain: BlockChain, inputs: Inputs) -> State:
    """The chain's weights after a few steps, with the scales that training measured."""
    net = freeze(chain, Span(0, len(chain)), variant="f")
    step = training_step(net, inputs)
    step()
    net.measure_scales()
    step()
    return chain_state(chain) | net.update().tensors


def fill_plan(chain: BlockChain, state: State, settings: Settings, plan: KernelPlan) -> None:
    """Choose the kernel of every map: each block once frozen, once passing."""
    n = len(chain)
    for span in (Span(n - 1, n), Span(0, 1)):
        freeze(
            chain, span, variant=settings.variant, backend=settings.backend, state=state, plan=plan
        )


def prepare(folder: Path, settings: Settings) -> None:
    """Write the workspace; what is there already stays, so that a resumed sweep uses the same."""
    if (folder / _SETTINGS).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    plan = KernelPlan()
    if settings.method == "span":
        chain, inputs = settings.subject.chain()
        state = measured_state(chain, inputs)
        with (folder / _STATE).open("wb") as file:
            arrays: dict[str, Any] = {key: t.numpy() for key, t in state.items()}
            np.savez(file, **arrays)
        if settings.integers and len(chain) > 1:
            fill_plan(chain, state, settings, plan)
    plan.save(folder / _PLAN)
    write_whole(folder / _SETTINGS, json.dumps(asdict(settings)) + "\n")


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
