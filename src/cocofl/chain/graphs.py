"""What both ways of tracing have in common: recorded graphs, failures, and an untouched model."""

from __future__ import annotations

import copy
import functools
import inspect
import linecache
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from cocofl.errors import InvalidExample

BY_HAND = (
    "Blocks can also be given by hand, each taking the output of the one before: "
    "cocofl.BlockChain([stem, block1, ..., head])."
)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HERE = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)


class Call(NamedTuple):
    """One call of a module: it made the steps ``start:stop``."""

    path: str
    module: nn.Module
    start: int
    stop: int


@dataclass(frozen=True)
class Recorded:
    """A graph of one mode, and what was seen when it was made."""

    model: nn.Module
    graph: fx.Graph
    calls: list[Call]
    values: dict[str, Any]
    """The tensors and modules that the graph refers to."""
    owners: dict[str, tuple[str, ...]]
    """By node name the paths of the modules it was made in, outermost first."""
    lines: dict[str, str] = field(default_factory=dict)
    """By node name the line of the model's source that made it, where known."""


class Failure(Exception):
    """Tracing failed; ``suspects`` are the modules which, kept whole, may let it pass.

    They are in the order in which to try, from the inside out; the model itself is none of them.
    """

    def __init__(self, reason: str, suspects: Sequence[str]) -> None:
        super().__init__(f"{reason} (in {suspects[0]!r})" if suspects else reason)
        self.suspects = tuple(suspects)

    @classmethod
    def of(cls, error: Exception, suspects: Sequence[str]) -> Failure:
        """What an error means, with the line of the model's own source that led to it."""
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if is_own_source(frame.filename)]
        if own:
            message += f", at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}"
        return cls(message, suspects)


def does_not_run(
    model: nn.Module, example: Sequence[Tensor], where: str, error: Exception
) -> InvalidExample:
    """The error of a model that fails on the example by itself."""
    shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in example)
    return InvalidExample(
        f"{type(model).__name__} does not run on the example of shape {shapes}: "
        f"it fails in {where or 'its forward'!r} with: {error}"
    )


def is_own_source(filename: str) -> bool:
    """Whether a file is neither PyTorch's nor of this package."""
    return not filename.startswith((_HERE, _TORCH))


def own_line() -> tuple[str, int] | None:
    """The file and line of the model's own source that is running."""
    frame = inspect.currentframe()
    while frame is not None and not is_own_source(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def in_assertion() -> bool:
    """Whether the model is checking something with ``assert``."""
    where = own_line()
    return where is not None and linecache.getline(*where).lstrip().startswith("assert ")


def is_layer(module: nn.Module) -> bool:
    """Whether it is one of PyTorch's own layers, or made by subclassing one without a forward.

    PyTorch's containers are not layers.
    """
    forward = type(module).forward
    where = getattr(forward, "__module__", None) or ""
    return where.startswith(("torch.nn", "torch.ao.nn")) and forward is not nn.Sequential.forward


def has_matrix(module: nn.Module) -> bool:
    """Whether a module holds a matrix (in, out) and a bias (out), and nothing else.

    So it may be a linear layer by another name, such as the Conv1D of GPT-2.
    """
    held = {name: p for name, p in module._parameters.items() if p is not None}
    if held.keys() != {"weight", "bias"} or module._buffers or module._modules:
        return False
    return held["weight"].ndim == 2 and held["weight"].shape[1:] == held["bias"].shape


def is_container(module: nn.Module) -> bool:
    """Whether it is a plain ``nn.Sequential`` or the like, which says nothing about blocks."""
    own = type(module)
    return own.__module__.startswith("torch.nn") and own is not nn.TransformerEncoderLayer


def run_in_parts(module: nn.Module, *args: Any, **kwargs: Any) -> Callable[[], Any] | None:
    """How to run PyTorch's own encoders layer by layer; None for all else.

    Their own forward chooses between ways that come to the same, and so cannot be traced.
    """
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    if type(module) is nn.TransformerEncoder:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        # A mask that is causal, which its content tells, goes another way.
        masked = given.get("mask") is not None or given.get("is_causal")
        return None if masked else functools.partial(_run_encoder, module, given)
    if type(module) is nn.TransformerEncoderLayer:
        return functools.partial(_run_encoder_layer, module, *args, **kwargs)
    return None


def _run_encoder(encoder: nn.TransformerEncoder, given: Mapping[str, Any]) -> Any:
    x, padding = given["src"], given.get("src_key_padding_mask")
    for layer in encoder.layers:
        x = layer(x) if padding is None else layer(x, src_key_padding_mask=padding)
    return x if encoder.norm is None else encoder.norm(x)


def _run_encoder_layer(
    layer: nn.TransformerEncoderLayer,
    src: Any,
    src_mask: Any = None,
    src_key_padding_mask: Any = None,
    is_causal: bool = False,
) -> Any:
    def attended(x: Any) -> Any:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}
        how = {**masks, "need_weights": False, "is_causal": is_causal}
        return layer.dropout1(layer.self_attn(x, x, x, **how)[0])

    def fed_forward(x: Any) -> Any:
        return layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(x)))))

    if layer.norm_first:
        x = src + attended(layer.norm1(src))
        return x + fed_forward(layer.norm2(x))
    x = layer.norm1(src + attended(src))
    return layer.norm2(x + fed_forward(x))


def bound_inputs(
    model: nn.Module, inputs: int | Sequence[str]
) -> tuple[Callable[..., Any], list[str]]:
    """How to call the model with this many inputs, or with inputs of these names; and all names."""
    signature = inspect.signature(model.forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        parts = run_in_parts(model, *args, **kwargs)
        return parts() if parts else model.forward(*args, **kwargs)

    try:
        if not isinstance(inputs, int):
            names = list(inputs)
            signature.bind(**dict.fromkeys(names))
            return lambda *values: run(**dict(zip(names, values, strict=True))), names
        given = signature.bind(*range(inputs)).arguments
    except TypeError as error:
        count = inputs if isinstance(inputs, int) else len(inputs)
        raise InvalidExample(
            f"the example has {count} inputs, but {type(model).__name__}.forward takes "
            f"{signature}: {error}"
        ) from error
    names = []
    for name, value in given.items():
        several = isinstance(value, tuple)  # what ``*inputs`` takes in
        names += [f"{name}_{i}" for i in range(len(value))] if several else [name]
    return run, names


@contextmanager
def left_as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """In this mode; undo what a trace or a trial run does: flags, buffers, hooks, values kept."""
    before = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _REGISTRIES})
        for module in model.modules()
    ]
    collections = [
        (value, copy.copy(value))
        for module in model.modules()
        for value in vars(module).values()
        if type(value) in (dict, OrderedDict, list, set)  # hooks are in an OrderedDict
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for module in model.modules():
        module.training = training
    try:
        yield
    finally:
        for module, attributes, registries in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, values in registries.items():
                attributes[name].clear()
                attributes[name].update(values)
        for held, contents in collections:
            held.clear()
            (held.extend if isinstance(held, list) else held.update)(contents)
        for buffer, value in buffers:
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors that a value holds, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in tensors_in(part)]
    return []


def called_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """What a module makes of its arguments with other tensors in place of its own."""
    try:
        return torch.func.functional_call(module, dict(tensors), args, kwargs)
    finally:
        for layer in module.modules():
            if isinstance(layer, nn.RNNBase):
                layer._init_flat_weights()  # PyTorch leaves it with the others
