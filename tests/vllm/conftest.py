from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nursery import forked_while_asked


@pytest.fixture(scope="session", autouse=True)
def forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from forked_while_asked(request, "tests.vllm.servers")
