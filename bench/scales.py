"""How far the scale of one value depends on which blocks a device trains, before any round.

    python bench/scales.py mobilenet 0:1 5:6 10:11 19:20

Prints, for some values of the network, the scale that each device measures in its first mini-batch.
Norms have the statistics they begin with (mean 0, variance 1) where they are frozen, and those of
the mini-batch where they are trained.
"""

from __future__ import annotations

import argparse

import torch

from cocofl import Span, freeze, split
from cocofl.freeze.region import IntegerRegion
from cocofl.freeze.steps import MapStep
from cocofl.models import MODELS
from cocofl.numerics import HEADROOM, LARGEST_CODE, SIGNED_LEVELS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("spans", nargs="+", metavar="A:B")
    parser.add_argument("--every", type=int, default=6, help="show every so manieth value")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MODELS[args.model](10)
    x, y = model.example_input(32), torch.randint(0, 10, (32,))
    chain, found = split(model, x), dict[str, dict[str, float]]()
    for span in args.spans:
        net = freeze(chain, Span.parse(span), backend="reference")
        torch.nn.functional.cross_entropy(net(x), y).backward()
        for part in net._parts:
            for step in part.run._steps if isinstance(part.run, IntegerRegion) else ():
                if isinstance(step, MapStep) and step._grid is not None:
                    levels = LARGEST_CODE if step._grid.zero_point == 0 else SIGNED_LEVELS
                    scale = step._grid.scale * levels / SIGNED_LEVELS / HEADROOM
                    found.setdefault(step.name, {})[span] = scale
    print(f"{'value':>32} " + " ".join(f"{span:>9}" for span in args.spans))
    for name in list(found)[:: args.every]:
        cells = (f"{found[name].get(span, float('nan')):9.2g}" for span in args.spans)
        print(f"{name:>32} " + " ".join(cells))


if __name__ == "__main__":
    main()
