from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nursery import forked_while_asked

# Before transformers, which imports torchvision where it is.
from tests.sglang.stand_ins import sitecustomize  # noqa: F401


@pytest.fixture(scope="session", autouse=True)
def forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from forked_while_asked(request, "tests.sglang.servers")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory):
    from tests.vllm.tiny_models import write_model

    return write_model("gqa", tmp_path_factory.mktemp("model")).folder


@pytest.fixture(scope="session")
def plain(model, tmp_path_factory: pytest.TempPathFactory):
    """A server by itself; called with a prompt, it has what to expect."""
    from tests.sglang.servers import SglangServer, running

    with running(SglangServer(model, tmp_path_factory.mktemp("plain"), "plain")) as (server,):
        yield server
