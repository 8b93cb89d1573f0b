"""Copies of a block that hold another state, without copying what is the same."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, fx, nn


def copy_block(block: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The block with its tensors cloned, taken from ``state`` where it has them.

    What is shared inside the block (a layer, a tied weight) is shared inside the copy. Copying a
    traced block with ``deepcopy`` would generate its code anew; this shares it.
    """
    made: dict[int, Any] = {}
    result = _copied(block, state, "", made)
    for module in block.modules():
        if not isinstance(module, fx.GraphModule):
            _copy_attributes(module, made)
    return result


def _copied(
    module: nn.Module, state: Mapping[str, Tensor], prefix: str, made: dict[int, Any]
) -> nn.Module:
    if id(module) in made:
        known: nn.Module = made[id(module)]
        return known
    result = object.__new__(type(module))
    result.__dict__ = dict(module.__dict__)
    made[id(module)] = result
    tensors = {**module._parameters, **module._buffers}
    for name, own in tensors.items():
        if own is not None and id(own) not in made:
            value = state.get(prefix + name, own).detach().clone()
            made[id(own)] = (
                nn.Parameter(value, own.requires_grad) if isinstance(own, nn.Parameter) else value
            )
    result._parameters = {
        n: None if p is None else made[id(p)] for n, p in module._parameters.items()
    }
    result._buffers = {n: None if b is None else made[id(b)] for n, b in module._buffers.items()}
    result._modules = {
        name: None if child is None else _copied(child, state, f"{prefix}{name}.", made)
        for name, child in module._modules.items()
    }
    return result


def _copy_attributes(module: nn.Module, made: dict[int, Any]) -> None:
    """Let attributes of the copy refer to the copy: bound methods, lists of weights or layers."""
    own = vars(made[id(module)])
    for name, value in vars(module).items():
        if name not in _REGISTRIES and not isinstance(value, _UNCHANGED) and not _is_empty(value):
            # A tensor that is no parameter may be part of an autograd graph: no deepcopy.
            is_tensor = isinstance(value, Tensor)
            own[name] = value.detach().clone() if is_tensor else copy.deepcopy(value, made)


_REGISTRIES = {"_parameters", "_buffers", "_modules"}
_UNCHANGED = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, type)


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list | tuple | set) and not value
