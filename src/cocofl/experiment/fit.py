"""Whether model, data, loss and metrics fit each other: found out before anything starts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cocofl.chain.graphs import left_as_it_was
from cocofl.data import DataSet
from cocofl.data.registry import REGISTRY
from cocofl.data.samples import Facts
from cocofl.errors import InvalidExperiment
from cocofl.fl.batches import tensors
from cocofl.fl.metrics import Metric
from cocofl.fl.trainer import Trainer
from cocofl.fl.training import FITTING, LOSSES, Training
from cocofl.models import MODELS
from cocofl.models.hugging_face import CAUSAL

MOST_CLASSES = 4096
"""Of metrics that count every pair of them: so many take 128 MiB."""


def check_inputs(example: Sequence[Tensor] | None, data: DataSet, model: str) -> None:
    """The samples must look like the model's example."""
    if example is None:
        return
    task, taken = data.facts.task, example[0]
    if task == "text":
        if taken.is_floating_point():
            raise InvalidExperiment(
                f"the model {model} takes {taken.dtype} of {_shape(taken.shape[1:])}, but "
                f"{data.name} has token ids; take a model that begins with an embedding, or give "
                "the data as floats"
            )
        return
    shape = sample_shape(data)
    if tuple(taken.shape[1:]) != shape or not taken.is_floating_point():
        what, axes = (
            ("images", " (channels, height, width)") if task == "image" else ("samples", "")
        )
        kind = "" if taken.is_floating_point() else f" {taken.dtype}"
        raise InvalidExperiment(
            f"the model {model} takes{kind} {what} of {_shape(taken.shape[1:])}{axes}, but "
            f"{data.name} has {_shape(shape)}{_way_out(model, tuple(taken.shape[1:]), data)}"
        )


def _way_out(model: str, wanted: tuple[int, ...], data: DataSet) -> str:
    """The options that would make images fit, where there are some."""
    shape = sample_shape(data)
    if data.facts.task != "image" or len(wanted) != 3 or wanted[0] not in (1, 3, shape[0]):
        return ""
    options = [f"size = {list(wanted[1:])}"] if wanted[1:] != shape[1:] else []
    options += [f"channels = {wanted[0]}"] if wanted[0] != shape[0] else []
    ways = [f"{', '.join(options)} in [data.options] (or of UserData), where these are files"]
    ways = ways if data.name not in REGISTRY else []
    is_like = wanted[0] == shape[0] and shape[1] == shape[2] and model in MODELS
    if is_like and "image_size" in inspect.signature(MODELS[model]).parameters:
        ways.append(f"image_size = {shape[1]} in [model.options]")
    return f"; say {', or '.join(ways)}" if ways else ""


def sample_shape(data: DataSet) -> tuple[int, ...]:
    """Of what the network is given."""
    shape = data.train.inputs.shape[1:]
    return (shape[2], *shape[:2]) if data.facts.task == "image" else shape


def usual_task(facts: Facts) -> str:
    """What a network of Hugging Face's is to do with such data, where nothing is said."""
    if facts.task != "text":
        return "image-classification" if facts.task == "image" else "audio-classification"
    if facts.labels != "tokens":
        return "sequence-classification"
    # Where the classes of tokens are the tokens, it is the next one that is to be told.
    return CAUSAL if facts.num_classes == facts.vocab_size else "token-classification"


def check_losses(loss: str, metrics: Sequence[Metric], data: DataSet) -> None:
    """What trains and tests the network must be able to read the labels."""
    kind, classes = data.facts.labels, data.facts.num_classes
    fitting, usual = FITTING[kind]
    way_out = (
        f'expected loss = "{fitting}" in [training] and metrics like {", ".join(usual)} in '
        "[evaluation], or your own as package.module:function"
    )
    if loss in LOSSES and loss != fitting:
        raise InvalidExperiment(
            f"training.loss is {loss!r}, but the labels of {data.name} are {kind}; {way_out}"
        )
    for one in metrics:
        if one.reads and kind not in one.reads:
            raise InvalidExperiment(
                f"evaluation.metrics has {one.name}, which reads {' or '.join(one.reads)}, but the "
                f"labels of {data.name} are {kind}; {way_out}"
            )
        if one.of_classes and classes > MOST_CLASSES:
            raise InvalidExperiment(
                f"evaluation.metrics has {one.name}, which counts every pair of classes, but the "
                f"labels of {data.name} are {kind} of {classes} classes; {way_out}"
            )


def check_calibration(training: Training, data: DataSet) -> None:
    """Margins are of classes, and of the loss that compares their scores."""
    if training.calibration and training.loss != "cross_entropy":
        raise InvalidExperiment(
            f"training.calibration is {training.calibration:g}, which lowers scores of classes, "
            f"but training.loss is {training.loss!r} and the labels of {data.name} are "
            f'{data.facts.labels}; expected loss = "cross_entropy", or calibration = 0'
        )


def check_outputs(trainer: Trainer, data: DataSet, model: str) -> None:
    """What the network returns for two samples must fit their labels."""
    inputs, labels = tensors(data.train, np.arange(min(2, len(data.train))))
    net = trainer.model()
    with torch.random.fork_rng(devices=[]), left_as_it_was(net, training=False), torch.no_grad():
        try:
            outputs = net(inputs)
        except Exception as error:
            reason = (str(error).splitlines() or [repr(error)])[0][:200]
            raise InvalidExperiment(
                f"the model {model} does not run on samples of {data.name}, {inputs.dtype} of "
                f"{_shape(inputs.shape[1:])}: {reason}"
            ) from error
    if not isinstance(outputs, Tensor):
        raise InvalidExperiment(
            f"the model {model} returns a {type(outputs).__name__}, and training.loss = "
            f"{trainer.training.loss!r} reads a tensor; return that alone, or name a loss of your "
            "own as package.module:function"
        )
    kind, classes = data.facts.labels, data.facts.num_classes
    given, n = tuple(outputs.shape[1:]), len(inputs)
    wanted: tuple[int, ...] = (*labels.shape[1:], classes) if kind == "tokens" else (classes,)
    if kind == "numbers":
        fits = len(outputs) == n and math.prod(given) == classes
    elif kind == "multilabel":
        fits = outputs.shape == (n, *wanted)
    else:  # scores beyond the classes do no harm
        fits = outputs.ndim == 1 + len(wanted) and len(outputs) == n
        fits = fits and given[:-1] == wanted[:-1] and given[-1] >= classes
    if not fits:
        raise InvalidExperiment(
            f"the model {model} returns {_by(given)} for a sample, but the labels of {data.name} "
            f"are {_IN_WORDS[kind].format(classes)}: expected {_by(wanted)}. Let the model's "
            f"function take num_classes, here {classes}, for its last layer"
        )


_IN_WORDS = {
    "classes": "one of {} classes",
    "tokens": "one of {} classes at each position",
    "multilabel": "yes or no for each of {} classes",
    "numbers": "numbers ({})",
}


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "1"


def _by(shape: Sequence[int]) -> str:
    """How many there are.

    >>> _by((3, 8)), _by((3,)), _by(())
    ('3×8 numbers', '3 numbers', '1 number')
    """
    return f"{_shape(shape)} number{'s' * (math.prod(shape) != 1)}"
