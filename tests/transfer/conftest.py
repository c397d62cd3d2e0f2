"""What the tests of workers share."""

from __future__ import annotations

import pytest

from tests.transfer.pair import Pair


@pytest.fixture
def pair():
    """A prefill and a decode worker."""
    return Pair()
