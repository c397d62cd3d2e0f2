"""Every rank of two nodes has a link of its own, and one that is cut costs its rank alone."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from tests.faults.links import unusable
from tests.faults.rails import LONGEST_S, REQUEST_BYTES, Rails

PROBLEM = unusable()
pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM or "it can")


@pytest.fixture(scope="module")
def rails(engine):
    # With MC_USE_IPV6, without which it listens for IPv4 alone, Mooncake reaches nobody at an IPv4 address.
    with Rails(engine, (4, 6) if engine == "nixl" else (6, 6)) as made:
        yield made


def failures(rails):
    return [Counter(one.ask("failures")) for one in (*rails.prefill, *rails.decode)]


@pytest.mark.timeout(180)
def test_each_rank_has_its_link_and_one_that_is_cut_is_named(rails):
    # To meet takes longest, where other tests run beside.
    for name in ("warm", "warm again", "warm once more"):
        if rails.wait(rails.hand_over(name)) == ["", ""]:
            break
    met = failures(rails)

    before = [one.ask("sent_bytes", rank) for rank, one in enumerate(rails.prefill)]
    assert rails.wait(rails.hand_over("whole")) == ["", ""]
    for rank, one in enumerate(rails.prefill):
        sent = one.ask("sent_bytes", rank) - before[rank]
        assert REQUEST_BYTES <= sent < 1.2 * REQUEST_BYTES, (rank, sent)

    at_bytes = rails.prefill[1].ask("sent_bytes", 1) + REQUEST_BYTES // 10
    began = time.monotonic()
    cut = rails.hand_over("cut")
    rails.prefill[1].ask("cut", 1, at_bytes)
    for asked in (cut, None):
        unharmed, reason = rails.wait(asked or rails.hand_over("during"))
        assert unharmed == ""
        assert "was not loaded" in reason
    assert time.monotonic() - began < 2 * LONGEST_S
    unharmed_p, harmed_p, unharmed_d, harmed_d = (
        now - then for now, then in zip(failures(rails), met, strict=True)
    )
    assert harmed_p["lease_expired"] == 2
    assert sum(harmed_d[reason] for reason in ("peer_out_of_reach", "load_timeout", "lost_with_peer")) == 2
    assert harmed_d["peer_lost"]
    assert {*unharmed_p, *unharmed_d} <= {"slow_link"}, "the other rank has lost nothing"
