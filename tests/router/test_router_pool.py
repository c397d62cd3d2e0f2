"""The choice of nodes: a model of it in a few lines, and the sentences of its contract one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LocalError
from kvconnect.router.options import RouterLimits
from kvconnect.router.pool import Lease, Pool, State

URLS = ["http://a", "http://b", "http://c"]


def make(count: int = 2, failures: int = 2, eject_s: float = 10.0) -> Pool:
    return Pool("prefill", URLS[:count], RouterLimits(failures_to_eject=failures, eject_s=eject_s))


def states(pool: Pool) -> dict[str, State]:
    return {node.url: node.state for node in pool.view()}


def fail(pool: Pool, url: str, now: float) -> bool:
    lease = pool.take(now, avoid=[other for other in URLS if other != url])
    assert lease is not None
    assert lease.url == url
    ejected = pool.unreachable(lease, now)
    pool.release(lease)
    return ejected


def test_the_least_loaded_node_is_taken_and_equals_take_turns() -> None:
    pool = make(3)
    first = [pool.take(0.0) for _ in range(3)]
    assert sorted(lease.url for lease in first if lease) == URLS
    assert first[1] is not None
    pool.release(first[1])
    fourth = pool.take(0.0)
    assert fourth is not None
    assert fourth.url == first[1].url
    idle = make(2)
    turns = []
    for _ in range(4):
        lease = idle.take(0.0)
        assert lease is not None
        turns.append(lease.url)
        idle.release(lease)
    assert turns == [URLS[0], URLS[1], URLS[0], URLS[1]]


def test_avoided_nodes_are_not_taken() -> None:
    pool = make(2)
    lease = pool.take(0.0, avoid=[URLS[0]])
    assert lease is not None
    assert lease.url == URLS[1]
    assert pool.take(0.0, avoid=URLS) is None


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    pool = make(1)
    assert not fail(pool, URLS[0], 0.0)
    lease = pool.take(0.0)
    assert lease is not None
    pool.answered(lease)
    pool.release(lease)
    assert not fail(pool, URLS[0], 0.0)
    assert fail(pool, URLS[0], 0.0)
    assert pool.take(9.9) is None
    assert pool.view()[0].ejections == 1


def test_half_open_lets_one_probe_through_and_its_verdict_decides() -> None:
    pool = make(1)
    fail(pool, URLS[0], 0.0)
    fail(pool, URLS[0], 0.0)
    probe = pool.take(10.0)
    assert probe is not None
    assert pool.take(10.0) is None
    assert pool.take_check(URLS[0], 10.0) is None
    assert not pool.unreachable(probe, 11.0)
    pool.release(probe)
    assert pool.take(20.9) is None
    again = pool.take_check(URLS[0], 21.0)
    assert again is not None
    assert pool.answered(again)
    pool.release(again)
    assert states(pool) == {URLS[0]: State.HEALTHY}
    assert pool.view()[0].ejections == 1


def test_a_probe_without_a_verdict_leaves_the_node_half_open() -> None:
    pool = make(1)
    fail(pool, URLS[0], 0.0)
    fail(pool, URLS[0], 0.0)
    probe = pool.take(10.0)
    assert probe is not None
    pool.release(probe)
    assert pool.take(10.0) is not None


def test_an_ejected_node_is_no_candidate_while_another_one_is_in_rotation() -> None:
    pool = make(2)
    fail(pool, URLS[0], 0.0)
    fail(pool, URLS[0], 0.0)
    for _ in range(5):
        lease = pool.take(100.0)
        assert lease is not None
        assert lease.url == URLS[1]


def test_news_from_before_the_ejection_does_not_prolong_it() -> None:
    pool = make(1)
    late = pool.take(0.0)
    assert late is not None
    fail(pool, URLS[0], 0.0)
    fail(pool, URLS[0], 0.0)
    assert not pool.unreachable(late, 9.0)
    assert pool.take(10.0) is not None


def test_only_an_answer_makes_a_pool_ready_and_checks_are_no_load() -> None:
    pool = make(1)
    assert not pool.is_ready()
    lease = pool.take_check(URLS[0], 0.0)
    assert lease is not None
    assert pool.view()[0].in_flight == 0
    pool.answered(lease)
    assert pool.is_ready()


def test_misuse_is_named() -> None:
    pool = make(1)
    lease = pool.take(0.0)
    assert lease is not None
    pool.release(lease)
    with pytest.raises(LocalError, match="given back before"):
        pool.release(lease)
    with pytest.raises(ConfigError, match="no decode node"):
        Pool("decode", [])
    with pytest.raises(ConfigError, match="twice"):
        Pool("decode", [URLS[0], URLS[0]])
    with pytest.raises(ConfigError, match="failures_to_eject"):
        RouterLimits(failures_to_eject=0)


STEP = st.tuples(
    st.sampled_from(["take", "check", "answered", "unreachable", "release", "wait"]), st.integers(0, 7)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_whatever_happens_load_is_counted_and_ejection_is_kept(steps: list[tuple[str, int]]) -> None:
    pool, now = make(3), 0.0
    held: list[Lease] = []
    ejected_until: dict[str, float] = {}
    for action, pick in steps:
        before = {node.url: node for node in pool.view()}
        if action == "wait":
            now += pick
        elif action in ("take", "check"):
            lease = pool.take(now) if action == "take" else pool.take_check(URLS[pick % 3], now)
            in_rotation = [n for n in before.values() if n.state in (State.UNKNOWN, State.HEALTHY)]
            if lease is None:
                assert action == "check" or not in_rotation
                continue
            state = before[lease.url].state
            assert state is not State.PROBING, "two probes at once"
            if state is State.EJECTED and (action == "take" or before[lease.url].was_seen):
                assert now >= ejected_until[lease.url]
                assert action == "check" or not in_rotation
            elif action == "take":
                assert before[lease.url].in_flight == min(node.in_flight for node in in_rotation)
            held.append(lease)
        elif held:
            lease = held[pick % len(held)]
            if action == "answered":
                pool.answered(lease)
                assert states(pool)[lease.url] is State.HEALTHY
            elif action == "unreachable":
                pool.unreachable(lease, now)
                became = states(pool)[lease.url]
                if became is State.EJECTED and before[lease.url].state is not State.EJECTED:
                    ejected_until[lease.url] = now + 10.0
            else:
                pool.release(lease)
                held.remove(lease)
        for node in pool.view():
            assert node.in_flight == sum(1 for h in held if h.is_load and h.url == node.url)
    for lease in held:
        pool.release(lease)
    assert all(node.in_flight == 0 for node in pool.view())
    assert State.PROBING not in states(pool).values()
    later = now + 1000.0
    assert pool.take(later) is not None, "a pool at rest always has somebody to try"
