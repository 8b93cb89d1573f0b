"""The chain itself: blocks, what they hand to each other, and the model's own state-dict keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from cocofl.errors import CannotSplit, InvalidExample


@dataclass(frozen=True)
class Wiring:
    """Which named values a block takes and hands on; the first of each is its main tensor.

    The first block of a chain takes the model's inputs in the order of the model's ``forward``.
    A block returns its one output as it is, and several as a tuple.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def handed_on(self, result: Any) -> dict[str, Any]:
        """By name what a block that returns this hands on."""
        results = result if len(self.outputs) > 1 else [result]
        return dict(zip(self.outputs, results, strict=True))


def last_uses(reads: Sequence[Iterable[str]], kept: Collection[str] = ()) -> list[list[str]]:
    """For each step the values that no later step reads, given the values that each reads."""
    last = {name: i for i, names in enumerate(reads) for name in names}
    finished: list[list[str]] = [[] for _ in reads]
    for name, i in last.items():
        if name not in kept:
            finished[i].append(name)
    return finished


class Flow:
    """How named values flow from call to call; each is dropped when the last has taken it."""

    def __init__(self, inputs: Sequence[str], wiring: Sequence[Wiring]) -> None:
        self._inputs, self._wiring = inputs, wiring
        self._finished = last_uses([wires.inputs for wires in wiring])

    def in_order(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """All inputs in their order; those that are not given by position are given by name."""
        missing = self._inputs[len(inputs) :]
        if set(named) != set(missing) and named:
            raise InvalidExample(
                f"the network takes {', '.join(self._inputs)}; given are {len(inputs)} by position "
                f"and {', '.join(named)}"
            )
        return [*inputs, *(named[name] for name in missing if named)]

    def run(self, calls: Iterable[Callable[..., Any]], inputs: Sequence[Any]) -> Any:
        """What the last call returns."""
        if len(inputs) != len(self._inputs):
            raise InvalidExample(
                f"the network takes {len(self._inputs)} inputs ({', '.join(self._inputs)}), "
                f"not {len(inputs)}"
            )
        values = dict(zip(self._inputs, inputs, strict=True))
        del inputs
        result: Any = None
        for call, wiring, finished in zip(calls, self._wiring, self._finished, strict=True):
            arguments = [values[name] for name in wiring.inputs]
            for name in finished:
                del values[name]
            result = call(*arguments)
            values |= wiring.handed_on(result)
        return result


class BlockChain(nn.Module):
    """A model as f_N(…f_1(x)), with the state-dict keys of the model it was made from.

    ``split`` makes one from a model that torch.fx can trace. What it cannot trace is given as a
    list of blocks, each taking the output of the one before:

    >>> chain = BlockChain([nn.Linear(4, 3), nn.Linear(3, 2)])
    >>> len(chain), list(chain.state_dict())
    (2, ['0.weight', '0.bias', '1.weight', '1.bias'])

    Blocks with names keep them in their keys, which thus can be those of an existing model:

    >>> chain = BlockChain({"stem": nn.Linear(4, 3), "layers.0": nn.Linear(3, 2)})
    >>> chain.block_keys(1)
    ('layers.0.weight', 'layers.0.bias')

    Values have names. A value stays available until the last block that takes it has run, so a
    padding mask that all blocks need is computed once and not handed from block to block.
    ``rest`` holds what the model has but never uses; it belongs to no block.
    """

    blocks: nn.ModuleList
    wiring: tuple[Wiring, ...]
    example: tuple[Any, ...] | None
    rest: nn.Module
    learned: tuple[tuple[str, ...], ...] | None = None
    """By block, the keys of what learns where it is trained; None where all of a block does."""

    def __init__(
        self,
        blocks: Mapping[str, nn.Module] | Iterable[nn.Module | tuple[str, nn.Module]],
        *,
        wiring: Sequence[Wiring] | None = None,
        example: Tensor | tuple[Any, ...] | None = None,
        rest: nn.Module | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """``keys`` maps each key of the model, in order, to the one a block or ``rest`` has it by.

        It is needed where one tensor has several keys, or their order is not that of the blocks.
        """
        super().__init__()
        self.blocks = nn.ModuleList(_named_blocks(blocks))
        self.rest = nn.Module() if rest is None else rest
        names = [f"x{i}" for i in range(len(self.blocks) + 1)]
        self.wiring = tuple(wiring or (Wiring((a,), (b,)) for a, b in pairwise(names)))
        self._flow = Flow(self.wiring[0].inputs, self.wiring)
        self.example = None if example is None else example_inputs(example)
        _refuse_shared_weights(self.blocks)

        self._places: dict[str, list[str]] = {}
        for i, block in enumerate(self.blocks):
            for key in block.state_dict():
                self._places.setdefault(key, []).append(f"blocks.{i}.{key}")
        for key in self.rest.state_dict():
            self._places.setdefault(key, []).append(f"rest.{key}")
        self._keys = {key: key for key in self._places} if keys is None else dict(keys)
        self.register_state_dict_post_hook(_to_own_keys)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_own_keys)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.blocks)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the model returns."""
        return self._flow.run(self.blocks, self._flow.in_order(inputs, named))

    @property
    def keys(self) -> dict[str, str]:
        """By each key of the model, in order, the one that a block or ``rest`` has it by."""
        return dict(self._keys)

    @property
    def learning_blocks(self) -> tuple[int, ...]:
        """The blocks that have something to learn."""
        every = range(len(self))
        return tuple(every if self.learned is None else (i for i in every if self.learned[i]))

    def block_keys(self, index: int) -> tuple[str, ...]:
        """The state-dict keys (parameters and persistent buffers) of one block."""
        return tuple(self.blocks[index].state_dict())


class GraphBlock(fx.GraphModule):
    """A block cut out of a trace.

    ``GraphModule`` makes every buffer that the graph reads persistent, and does so again on each
    copy; here a constant of the trace and a buffer that the model does not save stay unsaved.
    """

    def __init__(
        self, attributes: dict[str, Any] | nn.Module, graph: fx.Graph, unsaved: Iterable[str]
    ) -> None:
        super().__init__(attributes, graph)
        self.unsaved = tuple(unsaved)
        self._leave_out_unsaved()

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        result = super().__deepcopy__(memo)
        assert isinstance(result, GraphBlock)
        result.unsaved = self.unsaved
        result._leave_out_unsaved()
        return result

    def _leave_out_unsaved(self) -> None:
        for target in self.unsaved:
            path, _, name = target.rpartition(".")
            self.get_submodule(path)._non_persistent_buffers_set.add(name)


class _Named(nn.Module):
    """Puts a name before the state-dict keys of a module."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        (module,) = self.children()
        return module(*inputs)


def example_inputs(
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
) -> tuple[Any, ...]:
    """The example as a tuple of tensors that nobody else can change."""
    inputs = (example,) if isinstance(example, Tensor) else example
    if isinstance(inputs, Mapping):
        inputs = tuple(inputs.values())
    if not isinstance(inputs, tuple | list) or not inputs:
        raise InvalidExample(
            f"the example is a {type(example).__name__}; expected a tensor such as "
            "torch.zeros(2, 3, 32, 32), or a tuple of tensors, one for each input of the model"
        )
    for i, value in enumerate(inputs):
        if not isinstance(value, Tensor):
            raise InvalidExample(
                f"input {i} of the example is a {type(value).__name__}; expected a tensor"
            )
    return tuple(value.detach().clone() for value in inputs)


def _named_blocks(
    blocks: Mapping[str, nn.Module] | Iterable[nn.Module | tuple[str, nn.Module]],
) -> list[nn.Module]:
    result = []
    for i, item in enumerate(blocks.items() if isinstance(blocks, Mapping) else blocks):
        name, block = item if isinstance(item, tuple) else (str(i), item)
        if not isinstance(block, nn.Module):
            raise CannotSplit(f"block {i} is a {type(block).__name__}; expected an nn.Module")
        for part in reversed(name.split(".") if name else []):
            block = _Named(part, block)
        result.append(block)
    if not result:
        raise CannotSplit(
            "a chain needs at least one block; expected BlockChain([stem, ..., head])"
        )
    return result


def _refuse_shared_weights(blocks: nn.ModuleList) -> None:
    owner: dict[nn.Parameter, int] = {}
    for i, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if owner.setdefault(parameter, i) != i:
                raise CannotSplit(
                    f"blocks {owner[parameter]} and {i} share the parameter {name!r}: one could be "
                    "frozen while the other trains. Put all that share it into one block."
                )


def _to_own_keys(chain: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    assert isinstance(chain, BlockChain)
    held = {
        key.removeprefix(prefix): state.pop(key)
        for key in list(state)
        if key.startswith((f"{prefix}blocks.", f"{prefix}rest."))
    }
    for key, held_as in chain._keys.items():
        state[prefix + key] = held[chain._places[held_as][0]]


def _from_own_keys(
    chain: nn.Module,
    state: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing: list[str],
    unexpected: list[str],
    _errors: list[str],
) -> None:
    assert isinstance(chain, BlockChain)
    given = {
        key.removeprefix(prefix): state.pop(key) for key in list(state) if key.startswith(prefix)
    }
    missing += [prefix + key for key in chain._keys if key not in given]
    unexpected += [prefix + key for key in given if key not in chain._keys]
    # What is missing is reported under its own key above, and keeps its present value.
    children = (("blocks.", chain.blocks), ("rest.", chain.rest))
    present = {
        name + key: value
        for name, child in children
        for key, value in child.state_dict(keep_vars=True).items()
    }
    for key, places in chain._places.items():
        for place in places:
            state[prefix + place] = given.get(key, present[place])
