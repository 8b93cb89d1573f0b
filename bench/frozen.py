"""A step of a frozen network in int8 against the same with freezing alone, for models people have.

    python bench/frozen.py [NAME ...] [--repeats N] [--layers N]

Hugging Face models with random weights, as wide as they are published and with fewer layers; the
first, a middle and the last block trained. Variant `qff` with kernels `auto` and scales not yet
known, after two steps, and variant `f`, taken in turns. Times are medians, and so is the ratio of
the two steps of a turn, which what slows both does not change. Exit code 1 where a ratio is above
1.02.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cocofl

sys.modules["torchvision"] = None  # type: ignore[assignment]  # one for another PyTorch may be here
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
MOST = 1.02
WORDS = 5000
NETWORKS: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...] | None]] = {
    "bert": ("BertForSequenceClassification", "num_hidden_layers", {}, None),
    "distilbert": ("DistilBertForSequenceClassification", "n_layers", {}, None),
    "roberta": ("RobertaForSequenceClassification", "num_hidden_layers", {}, None),
    "vit": ("ViTForImageClassification", "num_hidden_layers", {}, (3, 224, 224)),
    "deit": (
        "DeiTForImageClassification",
        "num_hidden_layers",
        {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
        (3, 224, 224),
    ),
    "swin": ("SwinForImageClassification", "", {}, (3, 224, 224)),
    "convnext": ("ConvNextForImageClassification", "", {}, (3, 96, 96)),
    "mobilevit": ("MobileViTForImageClassification", "", {}, (3, 256, 256)),
    "gpt2": ("GPT2LMHeadModel", "n_layer", {}, None),
    "llama": (
        "LlamaForCausalLM",
        "num_hidden_layers",
        {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1376},
        None,
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "num_hidden_layers",
        {
            "hidden_size": 512,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "intermediate_size": 1376,
        },
        None,
    ),
    "t5": ("T5EncoderModel", "num_layers", {}, None),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        "num_hidden_layers",
        {"apply_spec_augment": False, "layerdrop": 0.0},
        (16000,),
    ),
    "whisper": (
        "WhisperModel",
        "encoder_layers",
        {"d_model": 384, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
         "decoder_layers": 1, "max_source_positions": 500},
        (80, 1000),
    ),
    "resnet": ("ResNetForImageClassification", "", {}, (3, 224, 224)),
}  # fmt: skip


def made(name: str, layers: int, batch: int) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """The model, and an example by the names of its inputs."""
    model_name, depth, options, shape = NETWORKS[name]
    model_class = getattr(transformers, model_name)
    if shape is None:
        options = options | {"vocab_size": WORDS, "pad_token_id": 0}
        options |= {"bos_token_id": 1, "eos_token_id": 2}
    if depth:
        options = options | {depth: layers}
    torch.manual_seed(0)
    model: Any = model_class(model_class.config_class(**options)).train()
    if shape is None:
        ids = torch.randint(3, WORDS, (batch, 128))
        return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    key = {1: "input_values", 2: "input_features", 3: "pixel_values"}[len(shape)]
    return model.encoder if name == "whisper" else model, {key: torch.randn(batch, *shape)}


def stepper(net: cocofl.FrozenNet, example: dict[str, Tensor]) -> Callable[[], float]:
    """Seconds of a forward and a backward pass."""

    def step() -> float:
        begin = time.perf_counter()
        result = net(**example)
        first = next(iter(result.values())) if isinstance(result, dict) else result
        first = first[0] if isinstance(first, tuple) else first
        first.square().mean().backward()
        for parameter in net.parameters():
            parameter.grad = None
        return time.perf_counter() - begin

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    given = parser.parse_args()
    worst = 0.0
    print(f"{'network':12} {'span':>6} {'f (ms)':>8} {'qff (ms)':>9} {'ratio':>6}")
    for name in given.names or NETWORKS:
        model, example = made(name, given.layers, given.batch)
        chain = cocofl.split(model, example)
        n = len(chain)
        for first in (n - 1, n // 2, 0):
            span = cocofl.Span(first, first + 1)
            nets = [cocofl.freeze(chain, span, variant=variant) for variant in ("f", "qff")]
            steps = [stepper(net, example) for net in nets]
            for step in steps * 2:
                step()
            times = [[step() for step in steps] for _ in range(given.repeats)]
            f, qff = (1000 * statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(qff_s / f_s for f_s, qff_s in times)
            worst = max(worst, ratio)
            mark = "  !" * (ratio > MOST)
            line = f"{name:12} {first:>3}:{first + 1:<2} {f:8.1f} {qff:9.1f} {ratio:6.2f}{mark}"
            print(line, flush=True)
    print(f"worst {worst:.2f}; {torch.get_num_threads()} threads, torch {torch.__version__}")
    sys.exit(worst > MOST)


if __name__ == "__main__":
    main()
