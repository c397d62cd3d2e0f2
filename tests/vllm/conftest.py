from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    if not any(item.get_closest_marker("servers") for item in request.session.items):
        yield
        return
    # Not where these tests are collected without vLLM.
    from tests.vllm.servers import forked

    with forked():
        yield
