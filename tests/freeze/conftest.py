"""Fixtures over the registry of networks."""

from __future__ import annotations

import pytest

from cocofl.models import MODELS
from tests.freeze.trained import Trained, trained

# Long to train, and built of the blocks of others.
SLOW = dict.fromkeys(("mobilenet-large", "mobilenet-groupnorm", "resnet50"), pytest.mark.slow)


@pytest.fixture(params=[pytest.param(name, marks=SLOW.get(name, ())) for name in MODELS])
def trained_network(request: pytest.FixtureRequest) -> Trained:
    return trained(request.param)
