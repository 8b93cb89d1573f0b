"""Copies of a block that hold another state, without copying what is the same."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def twin(block: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """The block with its tensors cloned, taken from ``state`` where it has them.

    Copying a traced block with ``deepcopy`` would generate its code anew; this shares it.
    """
    return _twin(block, state, "", {})


def _twin(
    module: nn.Module, state: Mapping[str, Tensor], prefix: str, made: dict[int, nn.Module]
) -> nn.Module:
    if id(module) in made:
        return made[id(module)]
    result = object.__new__(type(module))
    result.__dict__ = dict(module.__dict__)
    made[id(module)] = result
    result._parameters = {
        name: None if own is None else _parameter(state.get(prefix + name, own), own)
        for name, own in module._parameters.items()
    }
    result._buffers = {
        name: None if own is None else state.get(prefix + name, own).detach().clone()
        for name, own in module._buffers.items()
    }
    result._modules = {
        name: None if child is None else _twin(child, state, f"{prefix}{name}.", made)
        for name, child in module._modules.items()
    }
    return result


def _parameter(value: Tensor, own: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(value.detach().clone(), requires_grad=own.requires_grad)
