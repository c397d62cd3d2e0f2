from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.nursery import forked_while_asked

if TYPE_CHECKING:
    from tests.vllm.servers import Server


@pytest.fixture(scope="session", autouse=True)
def forked_servers(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from forked_while_asked(request, "tests.vllm.servers")


@pytest.fixture(scope="session")
def exact_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """The pair of all files whose subject is no setting of it: these count what they themselves add."""
    from tests.vllm.servers import EXACT, chat_options, pair
    from tests.vllm.tiny_models import write_model

    folder = tmp_path_factory.mktemp("exact")
    options = [*EXACT, *chat_options(folder), "--async-scheduling"]
    options += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    recipe, pauses = write_model("gqa", folder), {"VLLM_SERVER_DEV_MODE": "1"}
    times = {"lease_s": 120, "load_timeout_s": 20}
    with pair(recipe, folder, "nixl", options=options, environment=pauses, **times) as both:
        yield both


@pytest.fixture(scope="session", params=["sequential", "parallel"])
def routing(request: pytest.FixtureRequest, exact_pair: tuple[Server, Server]) -> Iterator[str]:
    """A router before ``exact_pair`` that knows where its prefill server is fetched from."""
    from tests.vllm.servers import routed, router

    prefill, decode = exact_pair
    with router("--flow", request.param, "--prefill", prefill.url, "--decode", decode.url) as url:
        routed(url, [1] * 40)
        prefill.wait_idle()
        yield url


_EXACT = ("test_first_token.py", "test_lifecycle.py", "test_leaving.py", "test_routed_endpoints.py")
"""The files that ask ``exact_pair``."""
_LONGEST = (
    "test_trouble.py",
    *_EXACT,
    "test_data_parallel.py",
    "test_model_kinds.py",
    "test_receipts.py",
    "test_tensor_parallel.py",
    "test_pulls.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, and what needs no servers comes last."""
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(
        key=lambda item: (item.get_closest_marker("servers") is None, ranks.get(item.path.name, len(ranks)))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadscope`` tests that share servers run in one process, others wherever one is free."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByServers(LoadScopeScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            folder, _, name = nodeid.split("::")[0].rpartition("/")
            if folder != "tests/vllm":
                return nodeid
            if name == "test_model_kinds.py":
                # Each kind has a pair of its own.
                return name + nodeid.partition("[")[2]
            own = name in ("test_trouble.py", "test_tensor_parallel.py")
            return nodeid if own else "exact" if name in _EXACT else name

    return ByServers(config, log)
