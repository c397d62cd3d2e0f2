"""Every rank of two nodes has a link of its own, and one that is cut costs its rank alone."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.faults.links import unusable
from tests.faults.rails import DEADLINES, REQUEST_BYTES, Rails

PROBLEM = unusable()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "it can")

LONGEST_S = DEADLINES["load_timeout_s"] + DEADLINES["lease_s"] + 5.0
"""What a request takes to end on both nodes, and slack."""


@pytest.fixture(scope="module")
def rails(engine):
    # With MC_USE_IPV6, without which it listens for IPv4 alone, Mooncake reaches nobody at an IPv4 address.
    with Rails(engine, (4, 6) if engine == "nixl" else (6, 6)) as made:
        yield made


@pytest.mark.timeout(120)
def test_each_rank_has_its_link_and_one_that_is_cut_is_named(rails):
    # To meet takes longest, where other tests run beside.
    for name in ("warm", "warm again", "warm once more"):
        rails.hand_over(name)
        said = rails.wait(name, LONGEST_S)
        rails.wait_let_go(name, LONGEST_S)
        if said == ["", ""]:
            break
    met = [rails.ask(place, "failures") for place in range(2)]

    before = [rails.ask(0, "sent_bytes", rank) for rank in range(2)]
    rails.hand_over("whole")
    assert rails.wait("whole", 30.0) == ["", ""]
    assert rails.ask(1, "same", "whole") == [True, True]
    for rank in range(2):
        sent = rails.ask(0, "sent_bytes", rank) - before[rank]
        assert REQUEST_BYTES <= sent < 1.2 * REQUEST_BYTES, (rank, sent)
    rails.wait_let_go("whole", 30.0)

    at_bytes = rails.ask(0, "sent_bytes", 1) + REQUEST_BYTES // 10
    rails.hand_over("cut")
    rails.ask(0, "cut", 1, at_bytes)
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
    (unharmed_p, harmed_p), (unharmed_d, harmed_d) = (
        [
            Counter(now) - Counter(then)
            for now, then in zip(rails.ask(place, "failures"), met[place], strict=True)
        ]
        for place in range(2)
    )
    assert harmed_p["lease_expired"] == 2
    assert sum(harmed_d[reason] for reason in ("peer_out_of_reach", "load_timeout", "lost_with_peer")) == 2
    assert harmed_d["peer_lost"]
    assert {*unharmed_p, *unharmed_d} <= {"slow_link"}, "the other rank has lost nothing"
