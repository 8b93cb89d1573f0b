"""The networks of the paper and two small ones, one plain definition each.

>>> model = MODELS["mobilenet"](num_classes=10, tiny=True)
>>> model(model.example_input(batch_size=4)).shape
torch.Size([4, 10])
"""

from __future__ import annotations

from typing import Protocol

from cocofl.models.base import Network
from cocofl.models.cnn import cnn
from cocofl.models.densenet import densenet40
from cocofl.models.mobilenet import mobilenet, mobilenet_groupnorm, mobilenet_large
from cocofl.models.resnet import resnet10_digits, resnet18, resnet50
from cocofl.models.transformer import transformer, transformer_seq2seq


class Factory(Protocol):
    """Builds a network, untrained."""

    def __call__(self, num_classes: int, *, width: float = 1.0, tiny: bool = False) -> Network:
        """``width`` is the share of the channels to keep; ``tiny`` is a small variant for tests.

        A narrower network has the same tensors under the same names, each a slice of the full
        network's: the leading channels, where heads or dense layers follow one another the
        leading channels of each (see :class:`~cocofl.models.transformer.Encoder` and
        :class:`~cocofl.models.densenet.DenseNet`).
        """
        ...


MODELS: dict[str, Factory] = {
    "cnn": cnn,
    "densenet40": densenet40,
    "mobilenet": mobilenet,
    "mobilenet-groupnorm": mobilenet_groupnorm,
    "mobilenet-large": mobilenet_large,
    "resnet10-digits": resnet10_digits,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "transformer": transformer,
    "transformer-seq2seq": transformer_seq2seq,
}

__all__ = ["MODELS", "Factory", "Network"]
