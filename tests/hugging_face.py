"""Tiny Hugging Face models with random weights, and an example for each."""

import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        # One that was built for another PyTorch; no model needs it.
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    transformers = pytest.importorskip("transformers")

transformers.logging.set_verbosity_error()

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TEXT = _SIZES | {"vocab_size": 50, "max_position_embeddings": 20}
_LANGUAGE = _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2}
_GPT = {"vocab_size": 50, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 20}
_GPT |= {"bos_token_id": 1, "eos_token_id": 1}
_VISION = _SIZES | {"image_size": 32, "patch_size": 8, "num_labels": 5}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "num_labels": 5}
_AUDIO = _SIZES | {
    "conv_dim": (32, 32), "conv_stride": (4, 2), "conv_kernel": (8, 4), "vocab_size": 30,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 5,
    "num_feat_extract_layers": 2, "classifier_proj_size": 16, "apply_spec_augment": False,
    "layerdrop": 0.0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": 50, "d_model": 32, "encoder_layers": 3, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 20, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
_LEVIT = {
    "image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4],
    "depths": [2, 2, 2], "key_dim": [8, 8, 8], "attention_ratio": [2, 2, 2],
    "mlp_ratio": [2, 2, 2], "num_labels": 5,
    "down_ops": [["Subsample", 8, 2, 4, 2, 2], ["Subsample", 8, 3, 4, 2, 2]],
}  # fmt: skip

Entry = tuple[str, str, dict[str, Any], tuple[int, ...] | None, int]
"""Model and configuration by name, options, the shape of its input (None for text), blocks."""

ASKED_FOR: dict[str, Entry] = {
    "bert": ("BertForSequenceClassification", "BertConfig", _TEXT, None, 5),
    "distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        {"vocab_size": 50, "dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64}, None, 5,
    ),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", _TEXT, None, 5),
    "vit": ("ViTForImageClassification", "ViTConfig", _VISION, (3, 32, 32), 5),
    "deit": ("DeiTForImageClassification", "DeiTConfig", _VISION, (3, 32, 32), 5),
    "swin": (
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2],
         "num_heads": [2, 4], "window_size": 4, "num_labels": 5}, (3, 32, 32), 7,
    ),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", _STAGES, (3, 64, 64), 14),
    "mobilevit": (
        "MobileViTForImageClassification", "MobileViTConfig",
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": 2,
         "neck_hidden_sizes": [8, 8, 12, 16, 20, 24, 48], "num_labels": 5}, (3, 64, 64), 10,
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT, None, 5),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LANGUAGE, None, 6),
    "qwen2": (
        "Qwen2ForCausalLM", "Qwen2Config", _LANGUAGE | {"tie_word_embeddings": True}, None, 5
    ),
    "t5": (
        "T5EncoderModel", "T5Config",
        {"vocab_size": 50, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 3,
         "num_heads": 2}, None, 8,
    ),
    "wav2vec2": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", _AUDIO, (400,), 5),
    "whisper": ("WhisperModel", "WhisperConfig", _WHISPER, (16, 40), 5),
    "resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        _STAGES | {"embedding_size": 8, "layer_type": "basic"}, (3, 64, 64), 7,
    ),
}  # fmt: skip
OTHERS: dict[str, Entry] = {
    "electra": ("ElectraForTokenClassification", "ElectraConfig",
                _TEXT | {"embedding_size": 16}, None, 5),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig",
               _TEXT | {"embedding_size": 16}, None, 7),
    "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", _TEXT, None, 5),
    "deberta-v2": (
        "DebertaV2ForSequenceClassification", "DebertaV2Config",
        _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"],
                 "position_buckets": 4}, None, 5,
    ),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
         "ffn_dim": 64, "max_position_embeddings": 20, "word_embed_proj_dim": 32}, None, 5,
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _TEXT, None, 5),
    "bloom": (
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": 50, "hidden_size": 32, "n_layer": 3, "n_head": 2}, None, 5,
    ),
    "beit": ("BeitForImageClassification", "BeitConfig", _VISION, (3, 32, 32), 5),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", _VISION, (3, 32, 32), 5),
    "hubert": ("HubertForSequenceClassification", "HubertConfig", _AUDIO, (400,), 5),
    "regnet": (
        "RegNetForImageClassification", "RegNetConfig",
        _STAGES | {"embedding_size": 8, "groups_width": 4}, (3, 64, 64), 7,
    ),
    "levit": ("LevitForImageClassification", "LevitConfig", _LEVIT, (3, 64, 64), 21),
}  # fmt: skip
ALL = ASKED_FOR | OTHERS


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in train mode, and an example by the names of its inputs."""
    model_name, config_name, options, shape, _ = ALL[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    if name == "whisper":
        model = model.encoder
    if shape is not None:
        key = {1: "input_values", 2: "input_features", 3: "pixel_values"}[len(shape)]
        return model.train(), {key: torch.randn(4, *shape)}
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1, 5:] = mask[3, 4:] = 0
    return model.train(), {"input_ids": torch.randint(3, 50, (4, 7)), "attention_mask": mask}
