"""The weights of frozen linear maps: norms folded in, and quantized, many at once.

A device gets other weights in every round, and has them frozen before its first step: what is done
to each weight by itself is paid for by Python, some hundred times over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cocofl.freeze.fusion import Affine, affine_of, fold_affine
from cocofl.freeze.gradient import transposed
from cocofl.freeze.operations import MapOp
from cocofl.numerics import QuantizedWeight, quantize_weights


class MapWeights(NamedTuple):
    """What a frozen map computes with."""

    forward: QuantizedWeight
    backward: QuantizedWeight | None
    """Of its input gradient: quantized anew, per input channel."""
    bias: Tensor | None


def map_weights(
    maps: Sequence[tuple[MapOp, nn.Module]],
    state: Mapping[str, Tensor],
    bits: int,
    *,
    passing: bool,
) -> list[MapWeights]:
    """Of maps, each with the block that it is in; where the state has no tensor, the block's own.

    Gradients are for those that are ``passing``.
    """
    norms = [None if op.norm is None else _norm(block, op.norm, state) for op, block in maps]
    layers = [None if op.layer is None else _holding(block, op.layer, state) for op, block in maps]
    affines = _affines(norms)
    folded = [
        _folded(op, layer, affine)
        for (op, _), layer, affine in zip(maps, layers, affines, strict=True)
    ]
    weights = [weight for weight, _ in folded]
    forward = quantize_weights(weights, bits)
    backward: list[QuantizedWeight | None] = [None] * len(maps)
    if passing:
        groups = [op.geometry.groups if op.geometry else 1 for op, _ in maps]
        turned = [transposed(w, g) for w, g in zip(weights, groups, strict=True)]
        # That of a filter per channel is the same, and is quantized already.
        others = [i for i, weight in enumerate(weights) if turned[i] is not weight]
        quantized = quantize_weights([turned[i] for i in others], bits)
        backward = [*forward]
        for i, one in zip(others, quantized, strict=True):
            backward[i] = one
    biases = [bias for _, bias in folded]
    return [MapWeights(*parts) for parts in zip(forward, backward, biases, strict=True)]


def _submodule(block: nn.Module, path: str) -> Any:
    """``get_submodule`` in a fifth of its time; the path is known to be there."""
    found: Any = block
    for name in path.split("."):
        found = found._modules[name]
    return found


def _holding(block: nn.Module, path: str, state: Mapping[str, Tensor]) -> Any:
    """A layer with the tensors that the state has for it, which are not copied."""
    layer = _submodule(block, path)
    made = object.__new__(type(layer))
    vars(made).update(vars(layer))
    for registry in ("_parameters", "_buffers"):
        held = vars(layer)[registry].items()
        own = {n: None if x is None else state.get(f"{path}.{n}", x).detach() for n, x in held}
        vars(made)[registry] = own
    return made


class _Norm(NamedTuple):
    """The tensors of a BatchNorm; it may have nothing that learns."""

    mean: Tensor
    variance: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float


def _norm(block: nn.Module, path: str, state: Mapping[str, Tensor]) -> _Norm:
    norm: Any = _submodule(block, path)
    own: dict[str, Any] = {**norm._buffers, **norm._parameters}

    def tensor(name: str) -> Any:
        return None if own[name] is None else state.get(f"{path}.{name}", own[name])

    mean, variance = tensor("running_mean"), tensor("running_var")
    return _Norm(mean, variance, tensor("weight"), tensor("bias"), norm.eps)


def _affines(norms: Sequence[_Norm | None]) -> list[Affine | None]:
    """What each norm does, where there is one; those that differ in their tensors only together."""
    kinds: dict[tuple[float, bool, bool], list[tuple[int, _Norm]]] = {}
    for i, norm in enumerate(norms):
        if norm is not None:
            kind = norm.eps, norm.weight is None, norm.bias is None
            kinds.setdefault(kind, []).append((i, norm))
    found: list[Affine | None] = [None] * len(norms)
    for (eps, *_), alike in kinds.items():
        columns = zip(*(norm[:4] for _, norm in alike), strict=True)
        mean, variance, weight, bias = (None if c[0] is None else torch.cat(c) for c in columns)
        assert mean is not None
        assert variance is not None
        lengths = [len(norm.mean) for _, norm in alike]
        pairs = (part.split(lengths) for part in affine_of(mean, variance, weight, bias, eps))
        for (i, _), factor, offset in zip(alike, *pairs, strict=True):
            found[i] = Affine(factor, offset)
    return found


def _folded(op: MapOp, layer: Any, affine: Affine | None) -> tuple[Tensor, Tensor | None]:
    """The float weight, as a kernel has it, and bias of a layer with its BatchNorm folded in."""
    if layer is None or op.kind is None:
        assert affine is not None
        return affine.factor.view(-1, 1, 1, 1), affine.offset
    weight, bias = op.kind.weight_of(layer).detach(), layer.bias
    if affine is not None:
        weight, bias = fold_affine(weight, bias, affine)
    return op.kind.to_image(weight), bias
