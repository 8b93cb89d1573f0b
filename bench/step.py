"""Step time and peak tensor memory of partly frozen training, next to full training.

    python bench/step.py mobilenet
    python bench/step.py resnet18 --spans 9:10 4:5 --variants qff --repeats 21

The other side of every ratio is plain PyTorch: the ordinary model, channels last, float32, same
batch, same threads, same process. Steps of all configurations are interleaved, so what disturbs
one disturbs all, and each ratio is the median over rounds of (this step / full step of its round).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

# Some twenty networks take turns in this one process, more than oneDNN's cache of compiled
# primitives holds by default; no training process has that many.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")

import torch
from torch import Tensor, nn

from cocofl import BlockChain, KernelPlan, Span, chain_state, freeze, split
from cocofl.allocator import keep_freed_memory
from cocofl.freeze import BFLOAT16, VARIANTS, FrozenNet, State
from cocofl.freeze.region import IntegerRegion
from cocofl.freeze.steps import MapStep
from cocofl.models import MODELS
from cocofl.profiling.memory import peak_tensor_bytes
from cocofl.profiling.subject import training_step

SPANS = {
    "mobilenet": ["19:20", "17:20", "10:11", "10:14", "0:1", "0:4", "0:20"],
    "resnet18": ["9:10", "4:5", "0:1", "0:10"],
    "densenet40": ["21:22", "10:11", "0:1", "0:22"],
}

Step = Callable[[], object]
Build = Callable[[], nn.Module]


def interleaved(steps: Mapping[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds per step, one step of each in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats + 2):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if round_ >= 2:  # the first two warm up
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def trained_a_little(name: str, x: Tensor, y: Tensor) -> tuple[nn.Module, State]:
    """A model after a few steps, and its state with the scales that training measured."""
    torch.manual_seed(0)
    model = MODELS[name](10)
    chain = split(model, x)
    net = freeze(chain, Span(0, len(chain)), variant="f")
    step = training_step(net, (x,), y)
    for _ in range(3):
        step()
    net.measure_scales()
    step()
    state = chain_state(chain) | net.update().tensors
    weights = {key: value for key, value in state.items() if not key.startswith("scales.")}
    model.load_state_dict(weights, strict=False)
    return model, state


def print_freezing(
    chain: BlockChain, spans: Sequence[str], state: State, plan: KernelPlan, repeats: int = 9
) -> None:
    """How long freezing takes that has been done before with other weights."""
    factors = [1 + 0.01 * i for i in range(repeats)]
    others = [{key: factor * tensor for key, tensor in state.items()} for factor in factors]
    for span in spans:
        freezes = [partial(freeze, chain, Span.parse(span), state=s, plan=plan) for s in others]
        seconds = [timeit(one, number=1) for one in freezes][2:]
        print(f"freeze {span}: {statistics.median(seconds) * 1e3:.1f} ms")


class Stopwatch:
    """Seconds by what is done, those of what is done inside it not counted twice."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = [0.0]

    def watched(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                taken = time.perf_counter() - begin
                own = taken - self._inside.pop()
                self.seconds[what] = self.seconds.get(what, 0.0) + own
                self._inside[-1] += taken

        return timed


def print_by_operation(span: str, net: FrozenNet, x: Tensor, y: Tensor, repeats: int) -> None:
    """The time of a step by what it is spent on, and the int8 kernels on their own."""
    watch, calls = Stopwatch(), list[Callable[[], object]]()
    regions = [part.run for part in net._parts if isinstance(part.run, IntegerRegion)]

    def remembered(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if len(calls) < maps:
                calls.append(partial(call, *args))
            return call(*args)

        return run

    maps = 0
    for region in regions:
        region.forward = watch.watched("region", region.forward)  # type: ignore[method-assign]
        region.backward = watch.watched("region", region.backward)  # type: ignore[method-assign]
        for step in region._steps:
            if isinstance(step, MapStep):
                maps += 1 + region.passing
                step._run = watch.watched("int8 kernels", remembered(step._run))
                if step._gradient is not None:
                    step._gradient = watch.watched("int8 kernels", remembered(step._gradient))
            what = "masks, caps" if isinstance(step, MapStep) else type(step).__name__
            step.forward = watch.watched(what, step.forward)  # type: ignore[method-assign]
            step.backward = watch.watched(what, step.backward)  # type: ignore[method-assign]
    for block in net.trained:
        block.forward = watch.watched("trained, forward", block.forward)
    whole = watch.watched("all else, backward of trained", training_step(net, (x,), y))
    whole()
    watch.seconds.clear()
    for _ in range(repeats):
        whole()
    print(f"{span}: {sum(watch.seconds.values()) / repeats * 1e3:.1f} ms a step, of these")
    for what, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        print(f"{seconds / repeats * 1e3:9.2f} ms  {what}")
    alone = sum(min(timeit(call, number=1) for _ in range(3)) for call in calls)
    print(f"{alone * 1e3:9.2f} ms  the int8 kernels one by one, each the shortest of three")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--spans", nargs="+", metavar="A:B")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--mallopt", action="store_true", help="keep freed memory (both sides)")
    parser.add_argument("--no-memory", action="store_true", help="skip the peak measurement")
    parser.add_argument("--unscaled", action="store_true", help="also qff that is sent no scales")
    parser.add_argument("--checkpoint", action="store_true", help="also qff that computes again")
    parser.add_argument("--bf16", action="store_true", help="also qff that trains in bfloat16")
    parser.add_argument("--by-operation", action="store_true", help="where the time of qff goes")
    parser.add_argument("--freezing", action="store_true", help="time freezing other weights, too")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.mallopt:
        keep_freed_memory()
    x = MODELS[args.model](10).example_input(args.batch)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (args.batch,), generator=torch.Generator().manual_seed(0))
    model, state = trained_a_little(args.model, x, y)
    chain, plan = split(model, x), KernelPlan()
    n = len(chain)
    spans = args.spans or SPANS.get(args.model) or [f"{n - 1}:{n}", f"{n // 2}:{n // 2 + 1}", "0:1"]

    def plain() -> nn.Module:
        fresh = MODELS[args.model](10)
        fresh.load_state_dict(model.state_dict())
        return fresh.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def builder(span: str, variant: str, **options: Any) -> Build:
        how = {"variant": variant, "backend": args.backend, "state": state, "plan": plan}
        return lambda: freeze(chain, Span.parse(span), **(how | options))

    builders = {"full": plain} | {
        f"{span} {variant}": builder(span, variant) for span in spans for variant in args.variants
    }
    if args.unscaled:
        weights = chain_state(chain)
        builders |= {f"{span} unscaled": builder(span, "qff", state=weights) for span in spans}
    if args.checkpoint:
        builders |= {f"{span} again": builder(span, "qff", checkpoint=True) for span in spans}
    if args.bf16:
        builders |= {f"{span} bf16": builder(span, "qff", precision=BFLOAT16) for span in spans}
    steps = {name: training_step(build(), (x,), y) for name, build in builders.items()}
    seconds = interleaved(steps, args.repeats)
    del steps
    peaks = {} if args.no_memory else {n: peak_tensor_bytes(b, (x,)) for n, b in builders.items()}

    full = seconds["full"]
    print(f"{args.model}, batch {args.batch}, {args.threads} threads, torch {torch.__version__}")
    peak = f", peak {peaks['full'] / 2**20:.1f} MiB" if peaks else ""
    print(f"full training, plain PyTorch: {statistics.median(full) * 1e3:.1f} ms{peak}")
    print(f"{'span':>7} {'variant':>8} {'ms':>8} {'time':>7} {'peak':>7}")
    rows = []
    for name in list(builders)[1:]:
        span, variant = name.split()
        ratio = statistics.median(a / b for a, b in zip(seconds[name], full, strict=True))
        memory = peaks[name] / peaks["full"] if peaks else float("nan")
        ms = statistics.median(seconds[name]) * 1e3
        rows.append({"span": span, "variant": variant, "ms": ms, "time": ratio, "peak": memory})
        print(f"{span:>7} {variant:>8} {ms:8.1f} {ratio:7.3f} {memory:7.3f}")
    if args.by_operation:
        for span in spans:
            net = freeze(chain, Span.parse(span), backend=args.backend, state=state, plan=plan)
            print_by_operation(span, net, x, y, args.repeats)
    if args.freezing:
        print_freezing(chain, spans, state, plan)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
