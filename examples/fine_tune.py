"""A small language model, fine-tuned where the text is: 12 unequal devices, and a report.

python examples/fine_tune.py [--lora]

A GPT-2 of four layers reads Python's language reference, which ships with Python. Then 12 devices
of three strengths, each with source code of its own, teach it Python. With --lora they train small
adapters beside int8 weights in place of whole blocks. Nothing is downloaded.
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from sysconfig import get_path

import torch

from cocofl import Experiment, simulate
from cocofl.data import UserData
from cocofl.fl.training import Training, cross_entropy
from cocofl.models.hugging_face import hugging_face
from cocofl.report.runs import find_runs
from cocofl.report.writing import write_report

SIZES = {"n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
TOKENS = {"vocab_size": 257, "bos_token_id": 0, "eos_token_id": 0}
MODULES = "ast calendar csv difflib enum fractions gzip heapq inspect shelve statistics uuid"


def code(_folder: Path | None) -> UserData:
    """Source code, a module per device."""
    files = [Path(get_path("stdlib"), f"{name}.py") for name in MODULES.split()]
    rows = [(text, file.stem) for file in files for text in file.read_text("utf-8").split("\n\n\n")]
    columns = dict(zip(("text", "owner"), zip(*rows, strict=True), strict=True))
    return UserData(columns, kind="next_token", tokenizer="bytes", length=64)


def pretrain(folder: Path) -> None:
    """A folder like those on the Hub, of a model that has read about Python, but no Python."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **SIZES, **TOKENS}))
    torch.manual_seed(0)
    model = hugging_face(f"hf:{folder}", task="causal-lm", init="random")
    text = torch.tensor(list("\n".join(topics.values()).encode())) + 1
    windows = text[torch.randint(len(text) - 64, (200, 16, 1)) + torch.arange(64)]
    losses = (cross_entropy(model(ids[:, :-1]), ids[:, 1:]) for ids in windows)
    Training(optimizer="adam").descend(model.parameters(), losses, lr=2e-3)
    model.network.save_pretrained(folder)


if __name__ == "__main__":
    pretrain(Path("runs/small-gpt2"))
    lora = {"train": "lora", "rank": 8, "alpha": 16.0} if "--lora" in sys.argv else {}
    run = simulate(Experiment("fine-tune-lora" if lora else "fine-tune", rounds=10).changed({
        "model.name": "hf:runs/small-gpt2",
        "data": {"name": "fine_tune:code", "split": "natural"},
        "devices": {"count": 12, "per_round": 6},
        "strategy": {"name": "cocofl", **lora},
        "training": {"optimizer": "adam", "lr": 3e-3 if lora else 1e-3, "batch": 16},
        "evaluation": {"metrics": ["perplexity", "token_accuracy"], "every": 2},
    }))  # fmt: skip
    print(*(f"{one.scores['perplexity']:.2f}" for one in run.evaluated))
    print(f"sent: {sum(one.bytes_up for one in run.rounds) / 1e6:.2f} MB")
    print(write_report(find_runs([run.path]), run.path / "report.html"))
