"""What is profiled and how, one step of its training, and what all measurements of a table share.

A device gets its weights and scales from the server, so every configuration is measured with
scales that were measured before, and all use the same int8 kernels: both are files of a workspace.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cocofl.chain import BlockChain, split
from cocofl.errors import InvalidModel, InvalidSetting
from cocofl.files import parsed_json, read_limited, replacing, write_text
from cocofl.freeze import (
    FLOAT32,
    PRECISIONS,
    VARIANTS,
    KernelPlan,
    State,
    adapt,
    backend_names,
    chain_state,
    freeze,
)
from cocofl.freeze.adapters import ALPHA
from cocofl.hub import is_hugging_face
from cocofl.models import MODELS
from cocofl.models.hugging_face import hugging_face
from cocofl.named import lookup, named_in_errors
from cocofl.profiling.configurations import Configuration, Cost, spans_over, spans_with_head
from cocofl.profiling.table import ProfileTable
from cocofl.profiling.table_file import METHODS
from cocofl.span import Blocks, Span

CLASSES = {"transformer": 2, "transformer-seq2seq": 81}  # 10 of all others
# The paper's 50 steps, and the levels its baselines use: FjORD's, and those of Transformers.
LEVELS = (0.125, 0.2, 0.4, 0.6, 0.625, 0.8, 0.8125)
STEPS = tuple(round(float(width), 4) for width in np.linspace(0.1, 1.0, 50))
WIDTHS = tuple(sorted({*STEPS, *LEVELS}))
_STATE, _PLAN, _SETTINGS = "state.npz", "plan.json", "settings.json"

Inputs = tuple[Tensor, ...]
Mark = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A registry name, ``package.module:factory`` or ``hf:NAME``, and the size of a mini-batch.

    A factory returns a module with ``example_input(batch_size)``, as the built-in networks have,
    or a pair of a module and an example input. For widths it takes ``width=``.
    """

    model: str
    batch: int = 32
    num_classes: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    """Further keyword arguments of the factory."""
    rank: int = 0
    """Of the low-rank adapters that devices train; 0 where they train whole blocks."""
    alpha: float = ALPHA
    """How much adapters count, as a multiple of their rank."""

    def build(self, width: float | None = None, *, seed: int = 0) -> tuple[nn.Module, Inputs]:
        """The model with the weights that ``seed`` gives, and a mini-batch."""
        if self.batch < 1:
            raise InvalidModel(f"batch is {self.batch}; a mini-batch has at least 1 sample")
        factory, arguments = self._factory()
        if width is not None:
            if "width" not in inspect.signature(factory).parameters:
                raise InvalidModel(
                    f"{self.model} takes no width=, which narrower networks need: give its "
                    "factory a keyword `width`, a ratio in (0, 1], that scales its channels"
                )
            arguments["width"] = width
        # Not the caller's random numbers: building a model must not change what is drawn next.
        with torch.random.fork_rng(devices=[]), named_in_errors(self.model, InvalidModel):
            torch.manual_seed(seed)
            made = factory(**arguments, **dict(self.options))
        model, example = made if isinstance(made, tuple) else (made, None)
        if not isinstance(model, nn.Module):
            raise InvalidModel(f"{self.model} gave a {type(model).__name__}; expected an nn.Module")
        return model, self._mini_batch(model, example)

    def narrowed(self, width: float) -> Subject:
        """The network at a width as one of its own, of which that is all."""
        self.build(width)  # complains of a network that has no other widths
        return replace(self, options=(*self.options, ("width", width)))

    def chain(
        self, width: float | None = None, *, samples: int | None = None
    ) -> tuple[BlockChain, Inputs]:
        """The model split into blocks by the look of ``samples`` (or all), and a mini-batch."""
        model, inputs = self.build(width)
        if isinstance(model, BlockChain):
            return self.adapted(model), inputs
        return self.adapted(split(model, tuple(x[:samples] for x in inputs))), inputs

    def adapted(self, chain: BlockChain) -> BlockChain:
        """The chain with adapters, where devices train these."""
        return adapt(chain, self.rank, self.alpha) if self.rank else chain

    def _factory(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        factory: Callable[..., Any]
        if is_hugging_face(self.model):
            factory = partial(hugging_face, self.model)
        else:
            factory = lookup(self.model, MODELS, "model", InvalidModel)
        classes = self.num_classes
        wanted = inspect.signature(factory).parameters.get("num_classes")
        if self.model in MODELS:
            classes = CLASSES.get(self.model, 10) if classes is None else classes
        elif wanted is None:
            classes = None
        elif classes is None and wanted.default is wanted.empty:
            raise InvalidModel(f"{self.model} takes num_classes; say --classes, like --classes 10")
        return factory, {} if classes is None else {"num_classes": classes}

    def _mini_batch(self, model: nn.Module, example: Any) -> Inputs:
        if example is None:
            make = getattr(model, "example_input", None)
            if make is None:
                raise InvalidModel(
                    f"{self.model} has no example_input(batch_size); add it, or let the factory "
                    "return (model, example)"
                )
            example = make(self.batch)
        tensors = (example,) if isinstance(example, Tensor) else tuple(example)
        batches = (torch.cat([x] * -(-self.batch // len(x)))[: self.batch] for x in tensors)
        return tuple(
            x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x for x in batches
        )


@dataclass(frozen=True)
class Settings(Subject):
    """What is profiled, and how."""

    method: str = "span"
    variant: str = "qff"
    backend: str = "auto"
    threads: int = 1
    head: bool = False
    """Whether the classifier, the last block, is trained beside every span."""
    checkpoint: bool = False
    """Whether trained blocks keep their inputs only, and are computed again in backward."""
    precision: str = FLOAT32
    """In which trained blocks are computed."""

    def __post_init__(self) -> None:
        # From JSON pairs come as lists.
        object.__setattr__(self, "options", tuple((name, value) for name, value in self.options))
        for what, value, choices in (
            ("method", self.method, METHODS),
            ("variant", self.variant, VARIANTS),
            ("backend", self.backend, backend_names()),
            ("precision", self.precision, PRECISIONS),
        ):
            if value not in choices:
                raise InvalidSetting(
                    f"unknown {what} {value!r}; expected one of {', '.join(choices)}"
                )
        if self.threads < 1:
            raise InvalidSetting(f"threads is {self.threads}; expected at least 1")
        if self.rank and self.method == "width":
            raise InvalidSetting("low-rank adapters belong to blocks; a table of widths has none")
        if self.checkpoint and (self.rank or self.method == "width"):
            raise InvalidSetting("checkpointing is for spans of blocks that are trained whole")
        if self.precision != FLOAT32 and (self.rank or self.method == "width"):
            raise InvalidSetting("bfloat16 is for spans of blocks that are trained whole")

    @property
    def integers(self) -> bool:
        """Whether frozen blocks are computed in int8."""
        return self.method == "span" and self.variant == "qff"

    def spans(self, learning: Sequence[int]) -> list[Blocks]:
        """All spans of blocks that learn, alone or each with the classifier."""
        return (spans_with_head if self.head else spans_over)(learning)

    def full(self, n_blocks: int) -> Configuration:
        """What shares of full training refer to: every block trained whole, at width 1."""
        return 1.0 if self.is_compared or self.method == "width" else Span(0, n_blocks)

    @property
    def is_compared(self) -> bool:
        """Whether what is compared with, plain training of every block, is no row of the table."""
        return bool(self.rank) or self.checkpoint or self.precision != FLOAT32

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
        if self.is_compared:
            full = rows.pop(1.0)
            known |= {"rank": self.rank, "checkpoint": self.checkpoint, "full": full}
            known["precision"] = self.precision
        return ProfileTable.from_costs(rows, n_blocks=n_blocks, **(known | facts))


def training_step(
    net: nn.Module, inputs: Inputs, target: Tensor | None = None, mark: Mark = lambda _: None
) -> Callable[[], None]:
    """One step as the paper times it: forward, zero-grad, backward, optimizer.

    Without a ``target`` a random class is made for each row of the first output.
    """
    net.train()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.01)

    def step() -> None:
        nonlocal target
        mark("step")
        output = net(*inputs)
        logits = output.flatten(0, -2) if output.ndim > 1 else output[:, None]
        if target is None:
            target = torch.randint(logits.shape[-1], logits.shape[:1])
        loss = F.cross_entropy(logits, target)
        del output, logits
        mark("zero")
        optimizer.zero_grad()
        mark("backward")
        loss.backward()
        mark("optimizer")
        optimizer.step()
        mark("end")

    return step


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
    """The kernel of every map, and whether int8 is worth it for the blocks around each block."""
    plan, n = KernelPlan(regions=True), len(chain)
    if settings.integers and n > 1:
        for i in chain.learning_blocks:
            freeze(chain, Span(i, i + 1), backend=settings.backend, state=state, plan=plan)
    return plan


def prepare(folder: Path, settings: Settings) -> None:
    """Write the workspace; what is there already stays, so that a resumed sweep uses the same."""
    if (folder / _SETTINGS).exists():
        return
    plan = KernelPlan()
    if settings.method == "span":
        chain, inputs = settings.chain()
        state = measured_state(chain, inputs)
        arrays: dict[str, Any] = {key: t.numpy() for key, t in state.items()}
        with replacing(folder / _STATE) as file:
            np.savez(file, **arrays)
        plan = kernel_plan(settings, chain, state)
    plan.save(folder / _PLAN)
    write_text(folder / _SETTINGS, json.dumps(asdict(settings)) + "\n")


def load_settings(folder: Path) -> Settings:
    """What the workspace was prepared for."""
    path = folder / _SETTINGS
    try:
        return Settings(**parsed_json(read_limited(path)))
    except (OSError, TypeError, ValueError) as error:
        raise InvalidSetting(f"{path} says nothing of a measurement: {error}") from error


def load_plan(folder: Path) -> KernelPlan:
    """The plan, to be obeyed; a map it lacks is chosen anew."""
    return KernelPlan.load(folder / _PLAN, fixed=False, regions=True)


def load_state(folder: Path) -> State:
    """The server's state."""
    with np.load(folder / _STATE) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}
