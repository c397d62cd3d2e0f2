"""The choice of nodes: a model of it in a few lines, and the sentences of its contract one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError, LocalError
from kvconnect.router.pool import NodeState, NodeUse, Pool
from kvconnect.router.router_options import RouterLimits

URLS = ["http://a", "http://b", "http://c"]


def make(count: int = 2, failures: int = 2) -> Pool:
    return Pool("prefill", URLS[:count], RouterLimits(failures_to_eject=failures))


def states(pool: Pool) -> dict[str, NodeState]:
    return {node.url: node.state for node in pool.view()}


def fail(pool: Pool, url: str) -> bool:
    lease = pool.take(avoid=[other for other in URLS if other != url])
    assert lease is not None
    assert lease.url == url
    ejected = pool.unreachable(url)
    pool.release(lease)
    return ejected


def test_the_least_loaded_node_is_taken_and_equals_take_turns() -> None:
    pool = make(3)
    first = [pool.take() for _ in range(3)]
    assert sorted(lease.url for lease in first if lease) == URLS
    assert first[1] is not None
    pool.release(first[1])
    fourth = pool.take()
    assert fourth is not None
    assert fourth.url == first[1].url
    idle = make(2)
    turns = []
    for _ in range(4):
        lease = idle.take()
        assert lease is not None
        turns.append(lease.url)
        idle.release(lease)
    assert turns == [URLS[0], URLS[1], URLS[0], URLS[1]]


def test_avoided_nodes_are_not_taken() -> None:
    pool = make(2)
    lease = pool.take(avoid=[URLS[0]])
    assert lease is not None
    assert lease.url == URLS[1]
    assert pool.take(avoid=URLS) is None


def test_failures_in_a_row_eject_and_a_success_between_them_does_not() -> None:
    pool = make(1)
    assert not fail(pool, URLS[0])
    assert pool.answered(URLS[0])
    assert not fail(pool, URLS[0])
    assert fail(pool, URLS[0])
    assert pool.take() is None
    assert pool.is_out()
    assert pool.view()[0].ejections == 1


def test_an_ejected_node_takes_nothing_until_it_answers() -> None:
    pool = make(2)
    fail(pool, URLS[0])
    late = pool.take(avoid=URLS[1:])
    fail(pool, URLS[0])
    assert states(pool)[URLS[0]] is NodeState.EJECTED
    for _ in range(5):
        lease = pool.take()
        assert lease is not None
        assert lease.url == URLS[1]
    # News from before the ejection, and checks that find it gone, are no further ejections.
    assert not pool.unreachable(URLS[0])
    assert late is not None
    pool.release(late)
    assert pool.view()[0].ejections == 1
    assert pool.answered(URLS[0])
    assert states(pool)[URLS[0]] is NodeState.HEALTHY
    lease = pool.take()
    assert lease is not None
    assert lease.url == URLS[0]


def test_only_an_answer_makes_a_pool_ready() -> None:
    pool = make(1)
    assert not pool.is_ready()
    assert pool.unseen() == URLS[:1]
    assert pool.answered(URLS[0])
    assert not pool.answered(URLS[0])
    assert pool.is_ready()
    assert pool.unseen() == []


def test_misuse_is_named() -> None:
    pool = make(1)
    lease = pool.take()
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


STEP = st.tuples(st.sampled_from(["take", "answered", "unreachable", "release"]), st.integers(0, 7))


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_whatever_happens_load_is_counted_and_ejection_is_kept(steps: list[tuple[str, int]]) -> None:
    pool = make(3)
    held: list[NodeUse] = []
    failures = dict.fromkeys(URLS, 0)
    for action, pick in steps:
        before, url = {node.url: node for node in pool.view()}, URLS[pick % 3]
        if action == "take":
            lease = pool.take()
            in_rotation = {one: node for one, node in before.items() if failures[one] < 2}
            assert (lease is None) is (not in_rotation)
            if lease is not None:
                assert lease.url in in_rotation
                least = min(node.in_flight for node in in_rotation.values())
                assert before[lease.url].in_flight == least
                held.append(lease)
        elif action == "answered":
            pool.answered(url)
            failures[url] = 0
            assert states(pool)[url] is NodeState.HEALTHY
        elif action == "unreachable":
            failures[url] += 1
            assert pool.unreachable(url) is (failures[url] == 2)
        elif held:
            pool.release(held.pop(pick % len(held)))
        for node in pool.view():
            assert node.in_flight == sum(1 for lease in held if lease.url == node.url)
            assert (node.state is NodeState.EJECTED) is (failures[node.url] >= 2)
    for lease in held:
        pool.release(lease)
    assert all(node.in_flight == 0 for node in pool.view())
    assert pool.is_out() is all(count >= 2 for count in failures.values())
