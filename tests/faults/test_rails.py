"""Every rank of two nodes has a link of its own, and one that is cut costs its rank alone."""

from __future__ import annotations

import time

import pytest

from tests.faults.links import unusable
from tests.faults.rails import DEADLINES, REQUEST_BYTES, Rails

PROBLEM = unusable()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "it can")

LONGEST_S = DEADLINES["load_timeout_s"] + DEADLINES["lease_s"] + 5.0
"""What a request takes to end on both nodes, and slack."""


@pytest.fixture(scope="module")
def rails(engine):
    # Of Mooncake's engines one process has either family.
    with Rails(engine, (4, 6) if engine == "nixl" else (4, 4)) as made:
        yield made


@pytest.mark.timeout(120)
def test_each_rank_has_its_link_and_one_that_is_cut_is_named(rails):
    rails.hand_over("warm")
    assert rails.wait("warm", 30.0) == ["", ""]
    rails.wait_let_go("warm", 30.0)

    before = [rails.sent_bytes(rank) for rank in range(2)]
    rails.hand_over("whole")
    assert rails.wait("whole", 30.0) == ["", ""]
    assert rails.ask(1, "same", "whole") == [True, True]
    for rank in range(2):
        sent = rails.sent_bytes(rank) - before[rank]
        assert REQUEST_BYTES <= sent < 1.2 * REQUEST_BYTES, (rank, sent)
    rails.wait_let_go("whole", 30.0)

    before[1] = rails.sent_bytes(1)
    rails.hand_over("cut")
    while rails.sent_bytes(1) < before[1] + REQUEST_BYTES / 10:
        time.sleep(0.001)
    rails.cut(1)
    began = time.monotonic()
    unharmed, reason = rails.wait("cut", LONGEST_S)
    assert (unharmed, rails.ask(1, "same", "cut")[0]) == ("", True)
    assert reason
    rails.hand_over("during")
    unharmed, reason = rails.wait("during", LONGEST_S)
    assert (unharmed, rails.ask(1, "same", "during")[0]) == ("", True)
    assert reason
    for name in ("cut", "during"):
        rails.wait_let_go(name, LONGEST_S)
    assert time.monotonic() - began < 2 * LONGEST_S
    of_prefill, of_decode = rails.ask(0, "failures"), rails.ask(1, "failures")
    assert of_decode[1]["load"] == 2
    assert of_decode[1]["peer_lost"]
    assert of_prefill[1]["lease_expired"] == 2
    assert {*of_prefill[0], *of_decode[0]} <= {"slow_link"}, "the other rank has lost nothing"
