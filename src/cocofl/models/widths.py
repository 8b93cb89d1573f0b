"""Which part of the full network's tensors a narrower one holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Size, Tensor, nn

from cocofl.errors import InvalidModel
from cocofl.models.base import Segments

Place = tuple[slice | Tensor, ...]
"""An index into a full tensor: ``full[place]`` is what the narrower network holds of it."""


def places(full: nn.Module, narrow: nn.Module) -> dict[str, Place]:
    """By state-dict key, where each tensor of ``narrow`` lies in that of ``full``.

    The leading channels of every axis; where the networks have ``segments`` (heads, or pieces of
    a concatenation), the leading channels of each.

    >>> places(nn.Linear(4, 6), nn.Linear(2, 3))["weight"]
    (slice(0, 3, None), slice(0, 2, None))
    """
    sizes = {key: tensor.shape for key, tensor in full.state_dict().items()}
    narrower = {key: tensor.shape for key, tensor in narrow.state_dict().items()}
    if sizes.keys() != narrower.keys():
        key = min(sizes.keys() ^ narrower.keys())
        raise InvalidModel(
            f"the network and its narrower self do not have the same tensors: {key!r} is in one of "
            "them only. width= must change sizes, not layers"
        )
    pieces, fewer = _segments(full), _segments(narrow)
    return {
        key: _place(key, size, narrower[key], pieces.get(key, ()), fewer.get(key, ()))
        for key, size in sizes.items()
    }


def _segments(model: nn.Module) -> dict[str, tuple[Segments, ...]]:
    segments = getattr(model, "segments", None)
    return segments() if callable(segments) else {}


def _place(
    key: str, full: Size, narrow: Size, pieces: Sequence[Segments], fewer: Sequence[Segments]
) -> Place:
    if len(full) != len(narrow) or any(n > f for n, f in zip(narrow, full, strict=True)):
        raise InvalidModel(
            f"{key!r} has shape {list(narrow)} in the narrower network and {list(full)} in the "
            "full one; width= must shrink axes and leave their number as it is"
        )
    axes: list[slice | Tensor] = []
    for axis, n in enumerate(narrow):
        parts = pieces[axis] if axis < len(pieces) else ()
        axes.append(_leading(parts, fewer[axis]) if len(parts) > 1 else slice(0, n))
    if all(isinstance(axis, slice) for axis in axes):
        return tuple(axes)
    # Tensors as indices pick single elements; spread over one axis each they pick a grid of them.
    return tuple(
        (torch.arange(axis.stop) if isinstance(axis, slice) else axis).reshape(
            [-1 if other == i else 1 for other in range(len(axes))]
        )
        for i, axis in enumerate(axes)
    )


def _leading(pieces: Segments, fewer: Segments) -> Tensor:
    """The leading ``fewer[i]`` of each of the ``pieces``, which follow one another.

    >>> _leading((4, 4), (2, 1))
    tensor([0, 1, 4])
    """
    begins = torch.tensor((0, *pieces)).cumsum(0).tolist()
    return torch.cat(
        [torch.arange(begin, begin + n) for begin, n in zip(begins, fewer, strict=False)]
    )
