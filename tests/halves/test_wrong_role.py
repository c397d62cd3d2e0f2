"""What an operator hears of requests that ask a node for what its role does not do."""

from __future__ import annotations

import logging

import pytest

from tests.halves.test_scheduler_half import Request, connector, prefilled

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
