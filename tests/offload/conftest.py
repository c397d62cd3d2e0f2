"""What a test has opened ends with it."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.offload.opened import TESTS


@pytest.fixture(autouse=True)
def _nothing_stays_open():
    with ExitStack() as stack:
        TESTS.append(stack)
        yield
        TESTS.pop()
