"""Which part of the full network's tensors a narrower one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.utils import _pytree as pytree

from cocofl.errors import InvalidModel
from cocofl.models.base import Segments

Place = tuple[slice | Tensor, ...]
"""An index into a full tensor: ``full[place]`` is what the narrower network holds of it."""


Order = Callable[[int], Tensor]
"""From a number of channels to all of them, in the order in which narrower networks have them.

It goes by their number alone: so layers agree that must, as those that are added up.
"""


def places(
    full: nn.Module,
    narrow: nn.Module,
    roll: int = 0,
    *,
    order: Order | None = None,
    whole: bool = False,
) -> dict[str, Place]:
    """By state-dict key, where each tensor of ``narrow`` lies in that of ``full``.

    A window of the channels of every axis that ``narrow`` has fewer of: it begins at channel
    ``roll``, and goes on with the first one where channels end. Where the networks have
    ``segments`` (heads, or pieces of a concatenation), a window of each. Where they have
    ``roll_steps``, a channel is so many places. Instead of a window it can be the first channels
    in any other ``order``.

    With ``whole`` all channels in their order: of the full network with channels in this order
    the leading ones are the narrow network.

    >>> places(nn.Linear(4, 6), nn.Linear(2, 3))["weight"]
    (slice(0, 3, None), slice(0, 2, None))
    >>> places(nn.Linear(4, 6), nn.Linear(4, 3), roll=4)["bias"]
    (tensor([4, 5, 0]),)
    """
    sizes = {key: tensor.shape for key, tensor in full.state_dict().items()}
    narrower = {key: tensor.shape for key, tensor in narrow.state_dict().items()}
    if sizes.keys() != narrower.keys():
        key = min(sizes.keys() ^ narrower.keys())
        raise InvalidModel(
            f"the network and its narrower self do not have the same tensors: {key!r} is in one of "
            "them only. width= must change sizes, not layers"
        )
    pieces, fewer = _declared(full, "segments"), _declared(narrow, "segments")
    steps = _declared(full, "roll_steps")
    in_order = order or (lambda channels: (roll + torch.arange(channels)) % channels)
    found = {}
    for key, size in sizes.items():
        _check_shrinks(key, size, narrower[key])
        axes = zip(
            _segments(size, pieces.get(key, ())),
            _segments(narrower[key], fewer.get(key, ())),
            (*steps.get(key, ()), *[1] * len(size)),
            strict=False,
        )
        found[key] = _grid([_chosen(*axis, in_order, whole=whole) for axis in axes])
    return found


def check_rolls(full: nn.Module, narrow: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise :class:`InvalidModel` where a rolled window does not hold what belongs together.

    A network whose channels are all rolled, each with the weights that read it, computes the same.
    """
    trial = deepcopy(full).eval()
    numbers = torch.Generator().manual_seed(0)
    state = {key: _mixed(tensor, numbers) for key, tensor in trial.state_dict().items()}
    rolled = {key: state[key][at] for key, at in places(full, narrow, 1, whole=True).items()}
    outputs = []
    with torch.no_grad():
        for one in (state, rolled):
            trial.load_state_dict(one)
            leaves = pytree.tree_leaves(trial(*inputs))
            outputs.append([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    for before, after in zip(*outputs, strict=True):
        apart = float((after.double() - before.double()).norm())
        if not apart <= 1e-3 * float(before.double().norm()):
            raise InvalidModel(
                f"a window of {type(full).__name__}'s channels cannot roll: with its channels "
                "rolled by one it computes something else. Say in a method roll_steps() by how "
                "many places each axis rolls per channel, as where channels are flattened"
            )


def _mixed(tensor: Tensor, numbers: torch.Generator) -> Tensor:
    """A tensor without two equal channels; what was above zero, as variances are, stays so."""
    if not tensor.is_floating_point():
        return tensor.clone()
    noise = torch.rand(tensor.shape, generator=numbers, dtype=torch.float32).to(tensor.dtype)
    return tensor * (0.5 + noise) + 0.1 * noise


def _declared(model: nn.Module, what: str) -> Mapping[str, Any]:
    """What a network says of its tensors' axes, by key."""
    method = getattr(model, what, None)
    return method() if callable(method) else {}


def _segments(size: Size, declared: Sequence[Segments]) -> list[Segments]:
    """Of each axis its pieces; one where nothing else is said."""
    given = [*declared, *[()] * len(size)]
    return [pieces or (n,) for pieces, n in zip(given, size, strict=False)]


def _check_shrinks(key: str, full: Size, narrow: Size) -> None:
    if len(full) != len(narrow) or any(n > f for n, f in zip(narrow, full, strict=True)):
        raise InvalidModel(
            f"{key!r} has shape {list(narrow)} in the narrower network and {list(full)} in the "
            "full one; width= must shrink axes and leave their number as it is"
        )


def _chosen(
    pieces: Segments, fewer: Segments, step: int, order: Order, *, whole: bool
) -> slice | Tensor:
    """``fewer[i]`` of each of the ``pieces``, which follow one another; all in order if ``whole``.

    >>> _chosen((4, 4), (2, 1), 1, torch.arange, whole=False)
    tensor([0, 1, 4])
    >>> _chosen((6,), (4,), 2, lambda n: torch.arange(n).flip(0), whole=False)
    tensor([4, 5, 2, 3])
    """
    found, begin = [], 0
    for size, n in zip(pieces, fewer, strict=True):
        own = torch.arange(size)
        if n < size and step:
            own = own.view(-1, step)[order(size // step)].flatten()
        found.append(begin + (own if whole else own[:n]))
        begin += size
    places = torch.cat(found)
    first, last = int(places[0]), int(places[-1])
    in_a_row = len(found) == 1 and bool((places.diff() == 1).all())
    return slice(first, last + 1) if in_a_row else places


def _grid(axes: Iterable[slice | Tensor]) -> Place:
    """An index that picks a window of every axis at once."""
    axes = list(axes)
    if all(isinstance(axis, slice) for axis in axes):
        return tuple(axes)
    # Tensors as indices pick single elements; spread over one axis each they pick a grid of them.
    return tuple(
        (torch.arange(axis.start, axis.stop) if isinstance(axis, slice) else axis).reshape(
            [-1 if other == i else 1 for other in range(len(axes))]
        )
        for i, axis in enumerate(axes)
    )
