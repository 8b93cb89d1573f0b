"""Networks of Hugging Face's ``transformers`` by name: from a local folder, else from the Hub.

Only a configuration (JSON) and weights (safetensors) are read: no pickle, and no code that comes
with a model.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cocofl.errors import InvalidModel
from cocofl.hub import PREFIX, folder_of
from cocofl.named import nearest

logger = logging.getLogger("cocofl.models")

PRETRAINED, RANDOM = "pretrained", "random"
WEIGHTS = (PRETRAINED, RANDOM)
CAUSAL = "causal-lm"
TASKS = {
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    CAUSAL: "AutoModelForCausalLM",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
}
"""By what a network is to do, the class that makes it."""
_LENGTH, _PADDED, _FEW = 32, 3, 8
_OFFSET = 4
"""Positions that some models keep for padding."""
_AUDIO_SAMPLES = 16_000
# Layers that are left out by chance cannot be traced, and masks that are drawn hide what is heard.
_WITHOUT_CHANCE = {"layerdrop": 0.0, "apply_spec_augment": False}


class PretrainedNetwork(nn.Module):
    """A network of Hugging Face's that takes one tensor and returns scores, as ours do.

    The network itself is ``network``: ``network.save_pretrained(folder)`` writes what any program
    that knows Hugging Face's reads.
    """

    def __init__(self, network: nn.Module, task: str, example: Tensor, pad_id: int | None) -> None:
        super().__init__()
        self.network = network
        self._input_name = str(network.main_input_name)
        self._example = example
        # What follows is not looked at by a causal model: padding at the end needs no mask.
        self._pad_id = None if task == CAUSAL else pad_id

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (batch, length), pixels or sound to scores."""
        if self._input_name == "input_values" and x.ndim == 3:
            x = x.squeeze(1)  # the one channel of sound
        given = {self._input_name: x}
        if self._pad_id is not None:
            given["attention_mask"] = (x != self._pad_id).long()
        scores: Tensor = self.network(**given).logits
        return scores

    def example_input(self, batch_size: int = 2) -> Tensor:
        """A batch of the right shape and type, the same one every time."""
        return torch.cat([self._example] * -(-batch_size // len(self._example)))[:batch_size]


def hugging_face(
    name: str,
    num_classes: int = 2,
    *,
    task: str = "sequence-classification",
    init: str = PRETRAINED,
    shape: Iterable[int] = (),
    pad_id: int | None = None,
    vocab_size: int = 0,
) -> PretrainedNetwork:
    """The network for a task, with the weights of the folder (or the Hub), or with fresh ones.

    ``shape`` is that of a sample, ``pad_id`` the token that fills texts up, and ``vocab_size`` how
    many tokens the data has.
    """
    if task not in TASKS:
        raise InvalidModel(
            f"model.options.task is {task!r}{nearest(task, TASKS)}; expected one of "
            f"{', '.join(TASKS)}"
        )
    library, folder = _transformers(name), folder_of(name, "model", InvalidModel)
    place = name.removeprefix(PREFIX) if folder is None else str(folder)
    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": folder is not None}
    with _reading(name):
        config = library.AutoConfig.from_pretrained(place, **where)
    _adapt(config, task, num_classes, pad_id, vocab_size, name)
    make = getattr(library, TASKS[task])
    with _reading(name), _quiet(library):
        if init == RANDOM:
            network = make.from_config(config, trust_remote_code=False)
        else:
            network, found = make.from_pretrained(
                place,
                config=config,
                use_safetensors=True,
                ignore_mismatched_sizes=task != CAUSAL,  # another number of classes
                output_loading_info=True,
                dtype=torch.float32,
                **where,
            )
            _tell_new(name, network, found)
    parts = {part for part, _ in network.base_model.named_children()}
    if task == "sequence-classification" and {"encoder", "decoder"} <= parts:
        raise InvalidModel(
            f"{name} has an encoder and a decoder, and tells the class of a text by its one end "
            "token, which a text that is cut lacks; take an encoder like BERT, or a network of "
            "your own as package.module:function"
        )
    shape = tuple(shape)
    example = _example(network, shape, pad_id)
    if shape:
        _check_length(network, example, name)
    if task == CAUSAL:
        _check_looks_back(network, example, name)
    return PretrainedNetwork(network.train(), task, example, pad_id)


def _adapt(
    config: Any, task: str, num_classes: int, pad_id: int | None, vocab_size: int, name: str
) -> None:
    """Make a configuration that of a network for this task and these data."""
    config.use_cache = False
    for key, value in _WITHOUT_CHANCE.items():
        if hasattr(config, key):
            setattr(config, key, value)
    if task != CAUSAL:
        config.num_labels = num_classes
        if pad_id is not None:
            config.pad_token_id = pad_id
    known = getattr(config.get_text_config(), "vocab_size", None) or vocab_size
    if known < vocab_size:
        raise InvalidModel(
            f"the data has {vocab_size} tokens, but the model {name} knows {known}; read the texts "
            "with the model's own tokenizer.json ([data.options] tokenizer)"
        )


def _example(network: Any, shape: tuple[int, ...], pad_id: int | None) -> Tensor:
    """A mini-batch of two samples, with padding where there can be some."""
    rng, config = torch.Generator().manual_seed(0), network.config
    if network.main_input_name == "input_ids":
        length = shape[0] if shape else _LENGTH
        top = config.get_text_config().vocab_size
        ids = torch.randint(top, (2, length), generator=rng)
        if pad_id is not None:
            ids[ids == pad_id] = (pad_id + 1) % top
            ids[1, max(1, length - _PADDED) :] = pad_id
        return ids
    if not shape and network.main_input_name == "pixel_values":
        shape = (config.num_channels, config.image_size, config.image_size)
    return torch.randn((2, *(shape or (_AUDIO_SAMPLES,))), generator=rng)


def _check_length(network: Any, example: Tensor, name: str) -> None:
    """Refuse texts that reach past a table of positions; models without one take any length."""
    most = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    if example.ndim != 2 or not isinstance(most, int) or example.shape[1] + _OFFSET <= most:
        return
    try:
        with torch.no_grad():
            network.eval()(example)
    except (IndexError, RuntimeError) as error:  # RuntimeError: of BERT's table of sentences
        raise InvalidModel(
            f"the texts have {example.shape[1]} tokens, but the model {name} knows {most} "
            "positions; say a smaller length in [data.options]"
        ) from error


def _check_looks_back(network: Any, example: Tensor, name: str) -> None:
    """Refuse a model that sees the token which it is to tell, as BERT does."""
    ids = example[:1, :_FEW].clone()
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % network.config.get_text_config().vocab_size
    with _reading(name), torch.no_grad():
        one, two = (network.eval()(x).logits[:, :-1] for x in (ids, other))
    if (one - two).abs().max() > 1e-4 * one.abs().max():
        raise InvalidModel(
            f"{name} is no language model for {CAUSAL}: what it says of a token depends on those "
            "that follow it. Take one that only looks back (of BERT and its like that is one with "
            '"is_decoder": true in its config.json)'
        )


def _tell_new(name: str, network: nn.Module, found: Any) -> None:
    """Say which tensors the weights did not have: the head of a new task, and nothing else."""
    own = dict(network.named_parameters())
    new = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])} & own.keys()
    if len(new) == len(own):
        raise InvalidModel(f"the weights of {name} have no tensor of this network; is it another?")
    if new:
        logger.info("%s: new, and not pretrained: %s", name, ", ".join(sorted(new)))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Errors of the library as ours."""
    try:
        yield
    except InvalidModel:
        raise
    except Exception as error:  # it raises whatever its many models raise
        said = " ".join(str(error).split())[:300].rstrip(".")
        if "trust_remote_code" in said or "custom code" in said:
            said = "it brings code of its own, which is never run"
        elif "Unrecognized configuration class" in said:
            said = "transformers has no network of its kind for this task (model.options.task)"
        raise InvalidModel(
            f"cannot make a network of {name}: {said}. Expected config.json and *.safetensors of a "
            "model that transformers knows; a model that brings code of its own, or pickled "
            "weights, is not read"
        ) from error


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """Without progress bars and reports: what matters we say ourselves."""
    log, before = library.logging, library.logging.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def _transformers(name: str) -> Any:
    """The library, which is optional."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError):
            # One that was built for another PyTorch would keep every model from being imported,
            # and none that is read here needs it.
            for module in [key for key in sys.modules if key.partition(".")[0] == "torchvision"]:
                del sys.modules[module]
            sys.modules["torchvision"] = None  # type: ignore[assignment]
        try:
            import transformers  # noqa: PLC0415 - an optional library
        except ImportError as error:
            raise InvalidModel(
                f"the model {name} needs the library transformers: pip install 'cocofl[hf]' "
                f"({error})"
            ) from error
    return transformers
