"""The choice of nodes: a model of it in a few lines, and the sentences of its contract that it leaves out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.errors import ConfigError
from kvconnect.router.pool import NodeState, Pool
from kvconnect.router.router_options import RouterLimits

URLS = ["http://a", "http://b", "http://c"]
UNKNOWN, HEALTHY, EJECTED, DRAINING = NodeState
ACTIONS = ("take", "answered", "unreachable", "release", "computed", "drain", "add")
STEP = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 7))


class Model:
    """A node as the pool must know it."""

    def __init__(self) -> None:
        self.state, self.failures, self.ejections, self.was_seen = UNKNOWN, 0, 0, False
        self.takes = 0

    @property
    def takes_requests(self) -> bool:
        return self.state in (UNKNOWN, HEALTHY)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=60), st.booleans())
def test_whatever_happens_the_pool_is_what_its_model_is(steps, by_work) -> None:
    pool = Pool("prefill", URLS, RouterLimits(failures_to_eject=2))
    models, held, clock = {url: Model() for url in URLS}, [], itertools.count(1)
    for action, pick in steps:
        url, work = URLS[pick % 3], {url: float((at + pick) % 3) for at, url in enumerate(URLS)}
        model = models.get(url)
        if action == "take":
            in_flight = {one: sum(lease.url == one for lease in held) for one in models}
            done = {one: sum(lease.work for lease in held if lease.url == one) + work[one] for one in models}
            usable = [
                (done[one] if by_work else 0, in_flight[one], model.takes, at, one)
                for at, (one, model) in enumerate(models.items())
                if model.takes_requests and one != url
            ]
            lease = pool.take(avoid=[url], work=work if by_work else None)
            assert (lease.url if lease else None) == min(usable, default=(None,))[-1]
            if lease:
                models[lease.url].takes = next(clock)
                held.append(lease)
        elif action == "answered":
            is_new = model is not None and model.state not in (HEALTHY, DRAINING)
            assert pool.answered(url) is is_new
            if model is not None and model.state is not DRAINING:
                model.state, model.failures, model.was_seen = HEALTHY, 0, True
        elif action == "unreachable":
            counts = model is not None and model.takes_requests
            if counts:
                model.failures += 1
            is_out = counts and model.failures == 2
            assert pool.unreachable(url) is is_out
            if is_out:
                model.state, model.ejections = EJECTED, model.ejections + 1
        elif action == "release" and held:
            pool.release(held.pop(pick % len(held)))
        elif action == "computed" and held:
            pool.computed(held[pick % len(held)])
        elif action == "drain" and model is not None:
            pool.drain(url)
            model.state = DRAINING
        elif action == "add":
            pool.add(url)
            if model is None:
                models[url] = Model()
            elif model.state is DRAINING:
                model.state = UNKNOWN
        busy = {lease.url for lease in held}
        models = {one: model for one, model in models.items() if model.state is not DRAINING or one in busy}
        assert {node.url: (node.state, node.ejections, node.was_seen) for node in pool.view()} == {
            one: (model.state, model.ejections, model.was_seen) for one, model in models.items()
        }
        for node in pool.view():
            own = [lease for lease in held if lease.url == node.url]
            assert (node.in_flight, node.work) == (len(own), sum(lease.work for lease in own))
        assert set(pool.urls) == set(models)
        assert set(pool.unseen()) == {one for one, model in models.items() if not model.was_seen}
        assert pool.is_ready() is any(model.state is HEALTHY for model in models.values())
        assert bool(pool.in_rotation()) is any(model.takes_requests for model in models.values())


def test_the_node_of_a_session_is_taken_among_equals_and_never_when_it_is_overrun() -> None:
    pool = Pool("decode", ["a", "b"])
    taken = [pool.take(prefers="b").url for _ in range(8)]
    assert taken[:3] == ["b", "b", "b"]
    assert taken.count("b") <= 2 * taken.count("a") + 3
    # Less to compute is no tie.
    assert pool.take(work={"a": 1.0, "b": 2.0}, prefers="b").url == "a"
    assert pool.take(avoid=["a"], prefers="a").url == "b"


def test_misuse_is_named() -> None:
    pool = Pool("decode", URLS[:1])
    with pytest.raises(ConfigError, match="http://b is no decode node; there are http://a"):
        pool.drain("http://b")
    with pytest.raises(ConfigError, match="no decode node"):
        Pool("decode", [])
    with pytest.raises(ConfigError, match="twice"):
        Pool("decode", [URLS[0], URLS[0]])
