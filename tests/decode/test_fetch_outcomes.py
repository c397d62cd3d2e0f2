"""What an operator hears of requests that ask for KV and get none: a wrong role, a minute without any."""

from __future__ import annotations

import logging

import pytest

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.decode.decode_requests import WINDOW_S
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.outcome import Cause
from kvconnect.peer.handles import Handles
from kvconnect.transfer.orders import Results
from kvconnect.transfer.stack import StackTraits
from tests.halves.test_scheduler_half import ATTENTION, Request, connector, prefilled

ASKS_P = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.mark.parametrize(
    ("role", "other", "params"),
    [("kv_producer", "kv_consumer", None), ("kv_consumer", "kv_producer", ASKS_P)],
)
def test_a_node_that_is_asked_for_what_its_role_does_not_do_says_so_once_and_counts(
    caplog, role, other, params
):
    node, params = connector(role), params or prefilled()[2]
    with caplog.at_level(logging.WARNING):
        for name in ("a", "b"):
            node.new_request(Request(name, 41, params))
            assert node.matched_tokens(Request(name, 41, params), 0) == (0, False)
    assert node.build_orders().failures == ("wrong_role", "wrong_role")
    (said,) = caplog.messages
    assert f"kv_role is {role}" in said
    assert f"has to be {other} or kv_both" in said


def decode_node(clock):
    config = parse_kv_transfer_config({"kv_role": "kv_consumer", "engine_id": "D"})
    directory = (RankAddress(0, "10.0.0.2", 5600),)
    cache, handles = KVCacheConfig(100, (ATTENTION,)), Handles(b"what this cluster signs with", clock)
    return build_scheduler_half(config, cache, StackTraits(), directory=directory, trust=Trust(handles))


def load(node, name, failure=""):
    request = Request(name, 41, prefilled()[2])
    node.new_request(request)
    count, _ = node.matched_tokens(request, 0)
    node.update_after_alloc(request, ([1, 2, 3],), count)
    node.build_orders()
    node.update_results(Results(received=(name,), failed={name: Cause.LOST(failure)} if failure else {}))
    node.request_finished(request, ([1, 2, 3],), delivered=True)


@pytest.mark.parametrize("one_arrives", [False, True])
def test_a_minute_in_which_no_request_got_its_kv_is_warned_of(caplog, one_arrives):
    now = [0.0]
    node = decode_node(lambda: now[0])
    with caplog.at_level(logging.WARNING):
        load(node, "a", "the peer is gone")
        load(node, "b", "" if one_arrives else "the peer is gone")
        assert not caplog.messages
        now[0] += WINDOW_S
        load(node, "c", "the peer is gone")
        load(node, "d", "the peer is gone")
    assert ["none of the 2 requests" in said for said in caplog.messages] == [True] * (not one_arrives)
