"""In which precision trained blocks are computed.

In bfloat16 they multiply with 16 bits, and keep what backward reads in as many. Their weights,
gradients of weights, norm statistics and updates are float32 as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

FLOAT32, BFLOAT16 = PRECISIONS = ("float32", "bfloat16")

_UNITS = ("avx512_bf16", "amx_bf16", "bf16")
"""What processors with bfloat16 instructions have, as PyTorch calls it."""

_DTYPES = {torch.float32, torch.bfloat16}
_CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
_CONVOLUTION_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

logger = logging.getLogger(__name__)


def has_bfloat16_units() -> bool:
    """Whether this processor multiplies bfloat16 by itself; others convert, which takes longer."""
    features = torch.cpu.get_capabilities()
    return any(features.get(name) for name in _UNITS)


@cache
def tell_if_slow() -> None:
    """Once in a process."""
    if not has_bfloat16_units():
        logger.warning(
            "this processor has no bfloat16 instructions: blocks trained in bfloat16 take longer "
            "here than in float32; leave out precision"
        )


def in_precision(values: Any, dtype: torch.dtype) -> Any:
    """Tensors of float32 or bfloat16, in whatever structure, as this one of the two."""

    def changed(x: Tensor) -> Tensor:
        return x.to(dtype) if x.dtype in _DTYPES else x

    return pytree.tree_map_only(Tensor, changed, values)


def in_bfloat16(run: Callable[..., Any], *arguments: Any) -> Any:
    """What ``run`` returns when it multiplies in bfloat16; weights are cast as they are read."""
    device = next((x.device.type for x in arguments if isinstance(x, Tensor)), "cpu")
    with torch.autocast(device, torch.bfloat16), _StridedInFloat32():
        return run(*arguments)


class _StridedInFloat32(TorchFunctionMode):
    """Leaves out convolutions with a stride that are in groups, or of one pixel.

    oneDNN's gradient of the input of the first takes twenty to two hundred times as long in
    bfloat16; that of the weight of the others may be written beyond its buffer
    (:mod:`cocofl.freeze.layout`).
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _CONVOLUTIONS:
            named |= dict(zip(_CONVOLUTION_ARGUMENTS, args, strict=False))
            x, weight, stride = named["input"], named["weight"], named.get("stride", 1)
            alone = named.get("groups", 1) > 1 or weight[0, 0].numel() == 1
            if alone and max(stride if isinstance(stride, tuple) else (stride,)) > 1:
                with torch.autocast(x.device.type, enabled=False):
                    return func(**in_precision(named, torch.float32)).to(torch.bfloat16)
            args = ()
        return func(*args, **named)
