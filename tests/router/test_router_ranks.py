"""Nodes that are data-parallel ranks of one server: ``URL@RANK``."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.router_options import clean_url, split_rank
from tests.router.router_doubles import PARAMS, Node, answers, routed

ASK = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 8}
RANK = "X-data-parallel-rank"


@pytest.mark.parametrize(
    ("url", "base", "rank"),
    [
        ("http://h:8000@1", "http://h:8000", "1"),
        ("http://h:8000/@12", "http://h:8000", "12"),
        ("https://[::1]:80@0", "https://[::1]:80", "0"),
        ("http://h:8000", "http://h:8000", ""),
    ],
)
def test_a_node_may_be_a_rank(url: str, base: str, rank: str) -> None:
    assert split_rank(clean_url(url)) == (base, rank)


@pytest.mark.parametrize("url", ["http://h@x", "http://h@-1", "http://h:x@1", "ftp://h@1", "http://h@1@2"])
def test_what_is_none(url: str) -> None:
    with pytest.raises(ConfigError):
        clean_url(url)


@pytest.mark.parametrize("flow", ["sequential", "parallel"])
def test_each_rank_is_asked_by_name_in_both_legs_and_fetched_from_where_it_is(flow: str) -> None:
    """The parallel flow tells a decode node where a prefill node's last answer was: of the same rank."""

    async def prefilled(request):
        number = int(request.headers[RANK])
        return await answers(body={"kv_transfer_params": {**PARAMS, "remote_port": 4711 + number}})(request)

    async def main() -> None:
        prefill, decode = Node(prefilled), Node(answers(body={"token_ids": [1]}))
        async with prefill.serving(), decode.serving():
            ranked = [[f"{node.url}@{rank}" for rank in (0, 1)] for node in (prefill, decode)]
            async with routed(*ranked, flow=flow) as client:
                for _ in range(6):
                    status, _, raw = await client.post(ASK, headers={RANK.lower(): "7"})
                    assert (status, json.loads(raw)) == (200, {"token_ids": [1]})
                if flow == "parallel":
                    assert await client.metric('kvconnect_router_flows_total{flow="parallel"}') == 4
                    assert not await client.metric('kvconnect_router_flows_total{flow="resumed"}')
        for node in (prefill, decode):
            assert sorted(seen.headers.getall(RANK)[0] for seen in node.seen) == ["0"] * 3 + ["1"] * 3
            assert all(len(seen.headers.getall(RANK)) == 1 for seen in node.seen)
        ports = [seen.body["kv_transfer_params"]["remote_port"] for seen in decode.seen]
        assert sorted(ports) == [4711] * 3 + [4712] * 3

    asyncio.run(asyncio.wait_for(main(), 20))
