"""Which layer types are linear maps, and so have an int8 form.

A :class:`LinearLayer` says all there is to know about a type. Kernels, the reference, input
gradients and cohorts are made of that: a type of one's own is one class and one line,
``LAYERS[MyLayer] = MyLinearLayer()``, before a network with it is frozen.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, fx, nn

from cocofl.chain import graph_block
from cocofl.chain.graphs import has_matrix
from cocofl.errors import CannotSplit
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

    def weight_of(self, layer: Any) -> Tensor:
        """The weight as (out, in per group, ...)."""
        weight: Tensor = layer.weight
        return weight

    def own_weight(self, weight: Tensor) -> Tensor:
        """The other way: a weight as :meth:`weight_of` gives it, as the layer has it."""
        return weight

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


class TransposedProduct(LinearLayer):
    """A product ``x · weight + bias``, as GPT-2 has it: its weight is (in, out)."""

    def accepts(self, layer: nn.Module, shape: tuple[int, ...]) -> bool:
        """Where its forward is nothing but that product; see :func:`multiplies`."""
        return len(shape) > 1 and is_plain(layer, type(layer)) and multiplies(layer)

    def geometry(self, layer: nn.Module) -> None:
        """None: a product."""

    def weight_of(self, layer: Any) -> Tensor:
        """Transposed."""
        weight: Tensor = layer.weight
        return weight.t().contiguous()

    def own_weight(self, weight: Tensor) -> Tensor:
        """Transposed again."""
        return weight.t().contiguous()

    def describe(self, layer: Any) -> str:
        """Its sizes."""
        return f"linear {layer.weight.shape[0]}→{layer.weight.shape[1]}"


def multiplies(layer: nn.Module) -> bool:
    """Whether a module does nothing but ``torch.addmm(bias, x, weight)`` on a view of its input."""
    if not has_matrix(layer):
        return False
    try:
        graph = graph_block(layer, 1).graph
    except CannotSplit:
        return False
    kinds: dict[fx.Node, str] = {}
    for node in graph.nodes:
        given = [kinds.get(source, "") for source in node.all_input_nodes]
        kinds[node] = _kind_in_product(node, given)
    products = [node for node in graph.nodes if kinds[node] == "product"]
    returned = [kinds[node] for node in graph.output_node().all_input_nodes]
    return len(products) == 1 and "" not in kinds.values() and returned == ["result"]


def _kind_in_product(node: fx.Node, given: list[str]) -> str:
    """What a node is in the graph of a product; "" if it does not belong there."""
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op == "get_attr":
        return str(node.target)
    sizes = node.target in (operator.getitem, operator.add) and set(given) == {"size"}
    if sizes or (node.target == "size" and given == ["placeholder"]):
        return "size"
    if node.target == "view" and set(given[1:]) <= {"size"}:
        return {"placeholder": "input", "product": "result"}.get(given[0], "")
    is_product = node.target is torch.addmm and given == ["bias", "input", "weight"]
    return "product" if is_product and not node.kwargs else ""


def _margins(layer: Any) -> tuple[int, ...] | None:
    """How many zeros a convolution adds at each end of each axis; None where that is not it."""
    if layer.padding_mode != "zeros":
        return None
    if not isinstance(layer.padding, str):
        return tuple(layer.padding)
    lost = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    margins = [0 if layer.padding == "valid" else own // 2 for own in lost]
    return tuple(margins) if layer.padding == "valid" or not any(n % 2 for n in lost) else None


class Convolution(LinearLayer):
    """``nn.Conv2d``."""

    norms = (nn.BatchNorm2d,)

    def accepts(self, layer: nn.Conv2d, shape: tuple[int, ...]) -> bool:
        """Where it is a plain one whose gradient is a convolution again."""
        strided, dilated = set(layer.stride) != {1}, set(layer.dilation) != {1}
        return len(shape) == 4 and _margins(layer) is not None and not (strided and dilated)

    def geometry(self, layer: nn.Conv2d) -> Geometry:
        """As the layer has it."""
        margins = _margins(layer)
        assert margins is not None
        pairs = (layer.stride, margins, layer.dilation)
        stride, padding, dilation = ((vertical, horizontal) for vertical, horizontal in pairs)
        return Geometry(stride, padding, dilation, layer.groups)

    def describe(self, layer: nn.Conv2d) -> str:
        """Its kernel and channels."""
        size = "×".join(map(str, layer.kernel_size))
        kind = "depthwise" if layer.groups == layer.in_channels > 1 else "conv"
        return f"{kind} {size} {layer.in_channels}→{layer.out_channels}"


class SignalConvolution(LinearLayer):
    """``nn.Conv1d``: a convolution over images that are one row high."""

    norms = (nn.BatchNorm1d,)
    reshapes = True

    def accepts(self, layer: nn.Conv1d, shape: tuple[int, ...]) -> bool:
        """Where it is a plain one whose gradient is a convolution again."""
        plain = layer.stride == (1,) or layer.dilation == (1,)
        return len(shape) == 3 and plain and _margins(layer) is not None

    def geometry(self, layer: nn.Conv1d) -> Geometry:
        """As the layer has it, along the row."""
        (stride,), (dilation,), margins = layer.stride, layer.dilation, _margins(layer)
        assert margins is not None
        return Geometry((1, stride), (0, margins[0]), (1, dilation), layer.groups)

    def describe(self, layer: nn.Conv1d) -> str:
        """Its kernel and channels."""
        return f"conv1d {layer.kernel_size[0]} {layer.in_channels}→{layer.out_channels}"

    def to_image(self, x: Tensor) -> Tensor:
        """With the one row."""
        return x.unsqueeze(-2)

    def from_image(self, x: Tensor) -> Tensor:
        """Without it."""
        return x.squeeze(-2)


LAYERS: dict[type[nn.Module], LinearLayer] = {
    nn.Linear: Product(),
    nn.Conv1d: SignalConvolution(),
    nn.Conv2d: Convolution(),
}


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
