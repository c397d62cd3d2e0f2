"""What the tests of workers share."""

from __future__ import annotations

import pytest

from kvconnect.config import ExtraConfig
from tests.worker.pair import Pair


@pytest.fixture(params=["direct", "packed"])
def pair(request):
    """A pair that takes one path."""
    return Pair(ExtraConfig(path=request.param))
