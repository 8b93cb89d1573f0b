"""Which kernel runs which linear map: measured once, then written down and obeyed.

A plan makes a second run use the same kernels as the first, which bit-equal resuming needs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cocofl.checks import check_of
from cocofl.errors import InvalidSetting, KernelMissing
from cocofl.files import parsed_json, read_limited, write_text
from cocofl.freeze.kernels import (
    KERNELS,
    REFERENCE,
    Kernel,
    LinearMap,
    Prepared,
    available,
    disagreement,
    kernel,
    leave_out,
    why_not,
)
from cocofl.freeze.layout import channels_last
from cocofl.freeze.patience import LONG_S, told_if_long
from cocofl.numerics import Codes, Grid, as_float

_REPEATS = 7
# Whole regions take long: where one is so much faster than the other, one look is enough.
_CLEAR = 0.8
_MEASURING = (
    "measuring which int8 kernels are fastest for this network on this machine; "
    "pass freeze(…, plan=…) a saved KernelPlan(regions=True) to do so once"
)
INT8, FLOAT = "int8", "float32"
"""What a whole region may be computed in."""
_FORMAT = "cocofl kernel plan 1"
_are_choices = check_of(dict[str, str])


class KernelPlan:
    """A choice of kernel per linear map, filled by measurement as new maps appear.

    A ``fixed`` plan measures nothing: a map it does not know is an error. With ``regions``, a
    region that is slower in int8 than in float32 is computed in float32. A simulation does
    without: what int8 does to training is what it is to show, however small the network.
    """

    def __init__(
        self,
        choices: Mapping[str, str] | None = None,
        *,
        fixed: bool = False,
        regions: bool = False,
    ) -> None:
        known = (*KERNELS, INT8, FLOAT)
        for signature, name in (choices or {}).items():
            if name not in known:
                raise KernelMissing(
                    f"the kernel plan asks for {name!r:.40} at {signature!r:.200}; "
                    f"known are {', '.join(known)}"
                )
        self._choices, self._fixed, self.regions = dict(choices or {}), fixed, regions
        self._kernels: dict[str, Kernel] = {}
        """By name, those that were looked up."""
        self._measured_s, self._is_measuring = 0.0, False

    @property
    def choices(self) -> dict[str, str]:
        """Kernel names by signature."""
        return dict(self._choices)

    def choose(self, linear_map: LinearMap) -> Kernel:
        """The kernel for this map; the fastest one here, if it is new."""
        signature = f"{linear_map.signature} | {torch.get_num_threads()} threads"
        if signature not in self._choices:
            if self._fixed:
                raise KernelMissing(f"the kernel plan says nothing about {signature!r}")
            with self._measuring():
                self._choices[signature] = fastest(linear_map)
        name = self._choices[signature]
        if name not in self._kernels:
            self._kernels[name] = kernel(name)
        return self._kernels[name]

    def choose_for_region(
        self, region: str, contenders: Callable[[], Mapping[str, Callable[[], object]]]
    ) -> str:
        """What this region is computed in: the faster here, if it is new."""
        if not self.regions:
            return INT8
        signature = f"{region} | {torch.get_num_threads()} threads"
        if signature not in self._choices:
            if self._fixed:
                raise KernelMissing(f"the kernel plan says nothing about {signature!r}")
            with self._measuring():
                self._choices[signature] = shortest(contenders(), 3, clear=_CLEAR)
        return self._choices[signature]

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """Say once what takes so long. Within a region its maps are measured, if they are new."""
        if self._is_measuring or self._measured_s >= LONG_S:
            yield
            return
        begin, self._is_measuring = time.perf_counter(), True
        try:
            with told_if_long(_MEASURING, self._measured_s):
                yield
        finally:
            self._is_measuring = False
            self._measured_s += time.perf_counter() - begin

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        text = json.dumps({"format": _FORMAT, "choices": self._choices}, indent=1, sort_keys=True)
        write_text(Path(path), text + "\n")

    @classmethod
    def load(
        cls, path: str | Path, *, fixed: bool = True, regions: bool | None = None
    ) -> KernelPlan:
        """Read a saved plan; by default it is then obeyed and never extended.

        Unless ``regions`` says otherwise, it is with regions if it was when it was saved.
        One that may be extended forgets kernels that are gone, and measures what they ran anew.
        """
        try:
            content = parsed_json(read_limited(Path(path)))
        except (OSError, ValueError) as error:
            raise InvalidSetting(f"{path} is not a kernel plan: {error}") from error
        if not (
            isinstance(content, dict)
            and content.keys() == {"format", "choices"}
            and content["format"] == _FORMAT
            and _are_choices(content["choices"])
        ):
            raise InvalidSetting(f"{path} is not a kernel plan of format {_FORMAT!r}")
        choices = content["choices"]
        if not fixed:
            usable = {name for name, k in KERNELS.items() if why_not(k) is None} | {INT8, FLOAT}
            choices = {map_: name for map_, name in choices.items() if name in usable}
        if regions is None:
            regions = not {INT8, FLOAT}.isdisjoint(choices.values())
        return cls(choices, fixed=fixed, regions=regions)


def fastest(linear_map: LinearMap) -> str:
    """The name of the kernel with the shortest time on this map, here and now."""
    device = linear_map.weight.codes.device
    shape, zero = linear_map.input_shape, linear_map.input_zero_point
    # Not the global generator: a run that measures must draw what one that obeys a plan draws.
    random = torch.Generator(device).manual_seed(0)
    values = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=random)
    x, out = Codes(channels_last(values), Grid(0.02, zero)), Grid(0.02, 0)
    ready: dict[str, Prepared] = {REFERENCE.name: REFERENCE.prepare(linear_map)}
    truth = as_float(ready[REFERENCE.name](x, None, None))
    for k in available(device):
        try:
            run = k.prepare(linear_map)
            # This warms up, too: packing, code generation, page faults.
            if problem := disagreement(k, as_float(run(x, None, None)), truth):
                leave_out(k.name, f"{problem} at {linear_map.signature}")
                continue
            run(x, out, None)
            ready[k.name] = run
        except Exception as error:
            if k is REFERENCE:
                raise
            leave_out(k.name, f"{type(error).__name__}: {error}")
    runs = {name: partial(run, x, out, None) for name, run in ready.items()}
    return shortest(runs, _REPEATS)


def shortest(runs: Mapping[str, Callable[[], object]], repeats: int, *, clear: float = 0.0) -> str:
    """The name of what takes the shortest time, all taken in turns.

    The shortest of several, not the median: what disturbs a run only ever makes it longer. It ends
    early when the others take longer than the shortest by a ``clear`` factor.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(_seconds(run))
        first, second, *_ = [*sorted(min(own) for own in times.values()), math.inf]
        if first < clear * second:
            break
    return min(times, key=lambda name: min(times[name]))


def _seconds(run: Callable[[], object]) -> float:
    wait: Callable[[], Any] = (
        torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    )
    wait()
    begin = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - begin
