"""Whom to ask for KV by name, and whether to load it pays."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.identity import Naming
from kvconnect.decode.sources import SLOW_REST_S, PrefillRate, Sources, is_worth_it

OURS = Naming("s", 16)
A, B, C, D, E = (("10.0.0.9", 5600 + number) for number in range(5))
tokens = st.integers(-100, 200_000)
seconds = st.just(0.0) | st.floats(1e-6, 100)
rates = st.floats(1, 1e6)


@given(st.integers(0, 100_000), seconds, st.just(0.0) | rates, st.data())
def test_what_is_no_gain_is_never_loaded(local, load_s, rate, data):
    most = 0 if load_s and rate else local // 16
    assert not is_worth_it(data.draw(st.integers(-100, most)), local, load_s, rate)


@given(st.integers(1, 200_000), seconds, rates)
def test_what_is_loaded_is_there_before_it_would_be_computed(gain, load_s, rate):
    chosen = is_worth_it(gain, 0, load_s, rate)
    if chosen:
        assert load_s < gain / rate
    # Not the other way about: what takes much longer to compute is loaded.
    assert chosen or gain / rate < load_s + 0.02


@given(tokens, st.integers(0, 1000), seconds, rates, st.floats(1, 10))
def test_more_gain_a_faster_link_and_slower_computing_never_speak_against_it(gain, local, load_s, rate, more):
    if is_worth_it(gain, local, load_s, rate):
        assert is_worth_it(round(gain * more), local, load_s, rate)
        assert is_worth_it(gain, local, load_s / more, rate)
        assert is_worth_it(gain, local, load_s, rate / more)


@pytest.mark.parametrize("rate", [0.0, 1000.0])
def test_without_a_known_rate_only_what_any_node_would_gain_by_is_loaded(rate):
    assert not is_worth_it(10_000, 0, math.inf, rate)
    assert is_worth_it(10_000, 0, 0.1, rate)
    assert is_worth_it(10_000, 0, 0.2, rate) == bool(rate)
    assert is_worth_it(100_000, 0, 0.0, rate)


def test_the_rate_is_that_of_prompts_long_enough_to_show_it():
    rate = PrefillRate()
    rate.measured(20, 0.001)
    rate.measured(1000, 0.0)
    assert rate.tokens_per_s == 0
    rate.measured(1000, 0.5)
    assert rate.tokens_per_s == 2000
    rate.measured(1000, 1.0)
    assert 1000 < rate.tokens_per_s < 2000


def test_configured_sources_take_turns_where_there_are_many_and_ours_is_none():
    sources = Sources(["10.0.0.9:5600", "10.0.0.9:5601", "10.0.0.1:1"], own=("10.0.0.1", 1))
    assert sources.chosen([]) == (A, B)
    assert sources.chosen([]) == (A, B)
    many = Sources([f"{host}:{port}" for host, port in (A, B, C, D, E)], own=("h", 1))
    assert [many.chosen([])[0] for _ in range(6)] == [A, B, C, D, E, A]
    assert len(many.chosen([])) == 3
    assert many.chosen([E, ("h", 1), A, B, C]) == (E, A, B)


def test_one_late_load_among_good_ones_is_forgiven_and_loads_that_only_cost_are_not():
    sources = Sources([], own=A)
    assert sources.loaded(C, -0.01, 0.0), "the first one already"
    for now in range(5):
        assert not sources.loaded(B, 0.1, now)
    assert not sources.loaded(B, -0.2, 5.0)
    assert not sources.is_resting(B, 5.0)
    for now in range(6, 9):
        if sources.loaded(B, -0.2, now):
            break
    assert sources.is_resting(B, now)
    assert sources.is_resting(B, now + SLOW_REST_S - 1)
    assert sources.loaded(B, -0.01, now + SLOW_REST_S), "what was good before counts no more"


def test_names_so_short_that_they_would_keep_us_busy_are_not_made():
    sources = Sources([], own=A)
    sources.names_by(B, Naming("s", 1))
    assert sources.naming(B, OURS) is None
    assert sources.naming(B, Naming("s", 1)) == Naming("s", 1), "unless ours are as short"


def test_what_is_remembered_is_bounded():
    sources = Sources([], own=A)
    for n in range(5000):
        sources.miss(B, n.to_bytes(4, "big"), 0.0)
        sources.rest(("h", n), 1e9)
        sources.loaded(("h", n), 1.0, 0.0)
        sources.names_by(("h", n), OURS)
    assert max(map(len, (sources._misses, sources._rests, sources._namings, sources._balances))) <= 4096
    assert sources.lacks(B, (4999).to_bytes(4, "big"), 0.0)
