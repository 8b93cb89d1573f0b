"""Make the tables that ship with the package: every variant by ``--fast``, and every width.

    python bench/tables.py epyc                      # all four networks, about an hour
    python bench/tables.py epyc mobilenet --kinds qff width

A table whose own check says that the machine was too busy (median error above ``--worst``) is
not kept: run it again on a quiet machine. Tables that are there already are left alone.
"""

from __future__ import annotations

import argparse
import time

from cocofl import ProfileTable
from cocofl.profiling.cost_model import fast_table
from cocofl.profiling.subject import Settings
from cocofl.profiling.table import SHIPPED

MODELS = ("mobilenet", "resnet18", "densenet40", "transformer")
KINDS = ("qff", "ff", "f", "width")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cpu", help="what the processor is called in the tables' names")
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worst", type=float, default=0.06)
    args = parser.parse_args()
    for model in args.models:
        for kind in args.kinds:
            path = SHIPPED / f"{args.cpu}-{model}+{kind}.json"
            if path.exists():
                continue
            begin = time.monotonic()
            method, variant = ("width", "qff") if kind == "width" else ("span", kind)
            settings = Settings(model, method=method, variant=variant, threads=args.threads)
            *_, table = fast_table(settings, every_width=True)
            assert isinstance(table, ProfileTable)
            good = table.error.get("time_median", 0.0) <= args.worst
            if good:
                table.save(path)
            print(
                f"{path.name}: {time.monotonic() - begin:.0f} s, {dict(table.error)}, full step "
                f"{table.full_step_s:.3f} s, least time {table.time.min():.3f}, memory "
                f"{table.memory.min():.3f}" + ("" if good else "; too noisy, not kept"),
                flush=True,
            )


if __name__ == "__main__":
    main()
