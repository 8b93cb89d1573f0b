"""The upload column of the authors' tables pins the networks, block by block.

What they counted differs in small ways from table to table, always below the tolerance:

- BatchNorm statistics count (ResNet18 and ResNet50 agree to 2e-5), except those of the stem and
  of MobileNet's head, and in DenseNet those of the norm that begins a span.
- In the Transformers the LayerNorms of all layers after a span count, too.
- `mobilenetlarge` never froze its stem: each span that does not begin with it is too large by it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from cocofl import Span, all_spans
from cocofl.models import MODELS

ROOT = Path(__file__).parents[2]
PAPER = Path(os.environ.get("COCOFL_PAPER", ROOT.parent / "shared" / "paper"))

# model: the table, its number of classes, the blocks of the network.
TABLES = {
    "densenet40": ("arm_densenet40", 10, 22),
    "mobilenet": ("x64_mobilenet", 10, 20),
    "mobilenet-groupnorm": ("x64_mobilenetgroupnorm", 10, 20),
    "mobilenet-large": ("x64_mobilenetlarge", 10, 20),
    "resnet18": ("arm_resnet18", 10, 10),
    "resnet50": ("x64_resnet50", 10, 18),
    "transformer": ("x64_transformer", 2, 8),
    "transformer-seq2seq": ("x64_transformerseq2seq", 81, 8),
}
CONTAINERS = {"dense", "layers", "residuals"}


def paper_upload(name: str) -> dict[Span, float]:
    path = PAPER / "tables" / f"{TABLES[name][0]}.json"
    if not path.exists():
        pytest.skip(f"the paper's tables are not at {PAPER}; set COCOFL_PAPER to their folder")
    rows = json.loads(path.read_text())["rows"]
    return {Span(start, stop): upload for start, stop, _time, _memory, upload in rows}


def block_sizes(name: str) -> list[int]:
    """Parameters and norm statistics of each block, in order."""
    with torch.device("meta"):
        model = MODELS[name](TABLES[name][1])
    sizes: Counter[str] = Counter()
    for key, tensor in model.state_dict().items():
        first, second = key.split(".")[:2]
        if not key.endswith("num_batches_tracked"):
            sizes[f"{first}.{second}" if first in CONTAINERS else first] += tensor.numel()
    return list(sizes.values())


def upload(sizes: list[int], span: Span) -> float:
    return sum(sizes[span.start : span.stop]) / sum(sizes)


@pytest.mark.parametrize("name", TABLES)
def test_number_of_blocks(name: str) -> None:
    assert len(block_sizes(name)) == TABLES[name][2]


@pytest.mark.parametrize("name", TABLES)
def test_every_span_uploads_what_the_paper_says(name: str) -> None:
    expected = paper_upload(name)
    sizes = block_sizes(name)
    assert set(expected) == set(all_spans(len(sizes)))
    ours = {span: upload(sizes, span) for span in expected}
    assert ours == pytest.approx(expected, abs=0.005)


def test_the_slip_of_mobilenet_large_is_its_unfrozen_stem() -> None:
    expected = paper_upload("mobilenet-large")
    sizes = block_sizes("mobilenet-large")
    stem = upload(sizes, Span(0, 1))
    for block in range(1, 15):  # in larger blocks, what else is missing from the total shows
        span = Span(block, block + 1)
        assert expected[span] - upload(sizes, span) == pytest.approx(stem, abs=1e-4), span
