"""Real processes are killed here: what a test starts ends with it, also where it fails."""

from __future__ import annotations

import pytest

from kvconnect.engine.registry import available_engines


@pytest.fixture(scope="module", params=["mooncake", "nixl"])
def engine(request) -> str:
    """A transfer library that runs here."""
    why_not = available_engines().get(request.param, "this version has no such engine")
    if why_not:
        pytest.skip(f"{request.param} cannot run here: {why_not}")
    return str(request.param)
