"""Which layer types are linear maps, and so have an int8 form.

A :class:`LinearLayer` says all there is to know about a type. Kernels, the reference, input
gradients and cohorts are made of that: a type of one's own is one class and one line,
``LAYERS[MyLayer] = MyLinearLayer()``, before a network with it is frozen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor, nn

from cocofl.freeze.kernels import Geometry


class LinearLayer(ABC):
    """A layer type with a ``weight`` (out, in per group, ...) and a ``bias`` (out) or None.

    Its result is ``weight · x + bias``: a product along the last axis, or a convolution.
    """

    norms: tuple[type[nn.Module], ...] = ()
    """Norms that are folded into the layer where they follow it."""
    reshapes = False
    """Whether :meth:`to_image` does anything."""

    @abstractmethod
    def accepts(self, layer: Any, shape: tuple[int, ...]) -> bool:
        """Whether this very layer, with a result of this shape, is such a map."""

    @abstractmethod
    def geometry(self, layer: Any) -> Geometry | None:
        """How it walks over images; None for a product along the last axis."""

    @abstractmethod
    def describe(self, layer: Any) -> str:
        """What it is, for a person to read."""

    def to_image(self, x: Tensor) -> Tensor:
        """An input, output or weight as a two-dimensional convolution has it.

        There may be one more axis in front, of devices.
        """
        return x

    def from_image(self, x: Tensor) -> Tensor:
        """The other way."""
        return x


class Product(LinearLayer):
    """``nn.Linear``."""

    def accepts(self, layer: nn.Linear, shape: tuple[int, ...]) -> bool:  # noqa: ARG002
        """Not without a batch."""
        return len(shape) > 1

    def geometry(self, layer: nn.Linear) -> None:
        """None: a product."""

    def describe(self, layer: nn.Linear) -> str:
        """Its sizes."""
        return f"linear {layer.in_features}→{layer.out_features}"


class Convolution(LinearLayer):
    """``nn.Conv2d``."""

    norms = (nn.BatchNorm2d,)

    def accepts(self, layer: nn.Conv2d, shape: tuple[int, ...]) -> bool:
        """Where it is a plain one whose gradient is a convolution again."""
        strided, dilated = set(layer.stride) != {1}, set(layer.dilation) != {1}
        return (
            len(shape) == 4
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
            and not (strided and dilated)
        )

    def geometry(self, layer: nn.Conv2d) -> Geometry:
        """As the layer has it."""
        assert not isinstance(layer.padding, str)
        pairs = (layer.stride, layer.padding, layer.dilation)
        stride, padding, dilation = ((vertical, horizontal) for vertical, horizontal in pairs)
        return Geometry(stride, padding, dilation, layer.groups)

    def describe(self, layer: nn.Conv2d) -> str:
        """Its kernel and channels."""
        size = "×".join(map(str, layer.kernel_size))
        kind = "depthwise" if layer.groups == layer.in_channels > 1 else "conv"
        return f"{kind} {size} {layer.in_channels}→{layer.out_channels}"


LAYERS: dict[type[nn.Module], LinearLayer] = {nn.Linear: Product(), nn.Conv2d: Convolution()}


def is_plain(layer: nn.Module | None, *kinds: type[nn.Module]) -> bool:
    """Whether a layer does just what PyTorch's own does, with a weight of its own.

    A subclass may have another forward, a hook may change what goes in and comes out, and a
    weight may be computed from others.
    """
    own = type(layer)
    return (
        layer is not None
        and any(
            issubclass(own, kind)
            and own.forward is kind.forward
            and getattr(own, "_conv_forward", None) is getattr(kind, "_conv_forward", None)
            for kind in kinds
        )
        and "weight" in layer._parameters
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (layer._backward_hooks or layer._backward_pre_hooks)
    )
