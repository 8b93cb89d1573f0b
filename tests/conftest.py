import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from cocofl.freeze import net
from cocofl.freeze.kernels import WITHOUT
from tests.command_line import Call, Done

# Tests of int8 need it, however small their networks are; where it is not worth it is tested apart.
net._DEFAULT_PLAN.regions = False

# How long one example takes says nothing on a shared machine; how many there are does.
settings.register_profile("cocofl", deadline=None)
settings.load_profile("cocofl")

# Tiny networks gain nothing from threads, and the tests run in several processes, as do commands
# that they start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What was started in the background may have been told to ignore Ctrl-C, and so would the commands
# that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _gone(*_arguments: object, **_named: object) -> None:
    raise RuntimeError("PyTorch has no quantized tensors, as if it were a later one")


if "legacy" in os.environ.get(WITHOUT, "").split():
    # `make test-without-legacy`: whoever still makes a quantized tensor is told.
    for _granularity in ("per_tensor", "per_channel"):
        setattr(torch, f"quantize_{_granularity}", _gone)
        setattr(torch, f"_make_{_granularity}_quantized_tensor", _gone)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of whole programs first: a file of them takes long, and nobody waits for the last."""
    here = Path(__file__).parent
    items.sort(key=lambda item: item.path.parent != here)


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Call]:
    """`cocofl` in this process, which saves its start, in a folder of the test's own."""
    from cocofl.cli import main  # noqa: PLC0415
    from cocofl.fl.metrics import metric  # noqa: PLC0415

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            main(words)
        return Done(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    # Another test may have modules, and metrics in them, of the same names.
    metric.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(f"{tmp_path}/"):
            del sys.modules[name]
