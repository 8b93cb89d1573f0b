"""Fixtures over the registry of networks."""

from __future__ import annotations

import pytest

from cocofl.models import MODELS
from tests.freeze.trained import Trained, trained


@pytest.fixture(params=list(MODELS))
def trained_network(request: pytest.FixtureRequest) -> Trained:
    return trained(request.param)
