"""What calibration makes of probes, and the choice between two paths, against links whose costs are known.

The links here are simulated stage by stage and share no formula with the model.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from dataclasses import astuple, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.plan.cost import (
    DEFAULT_PACK_BYTES_PER_S,
    DEFAULT_RATES,
    DEFAULT_ROUND_TRIP_S,
    PACKED_FROM_COPIES,
    EngineRates,
    LinkCost,
    Sample,
    fit,
)

KIB, MIB = 1 << 10, 1 << 20
PROBES = [(1, 4 * KIB), (1, 1 * MIB), (256, 1 * MIB), (2048, 32 * MIB), (1, 64 * MIB), (8, 512 * MIB)]


def between(least: float, most: float) -> st.SearchStrategy[float]:
    """Spread evenly over orders of magnitude."""
    return st.floats(math.log(least), math.log(most)).map(math.exp)


rates = st.builds(EngineRates, between(2e-6, 5e-3), between(1e-7, 3e-5), between(5e7, 4e11))


def true_direct(engine: EngineRates, copies: int, total_bytes: int) -> float:
    return engine.seconds_per_batch + copies * engine.seconds_per_copy + total_bytes / engine.bytes_per_s


# --- probes -----------------------------------------------------------------------------------------


@given(rates)
def test_clean_probes_foretell_every_other_batch(engine):
    found = fit([Sample(*shape, true_direct(engine, *shape)) for shape in PROBES])
    for copies, total_bytes in [(1, 16 * KIB), (64, 256 * KIB), (1000, 16 * MIB), (30_000, 1 << 30)]:
        expected = true_direct(engine, copies, total_bytes)
        assert true_direct(found, copies, total_bytes) == pytest.approx(expected, rel=0.25)


@given(rates, st.integers(0, 2**32), st.booleans())
def test_noise_and_a_hiccup_move_them_little(engine, seed, repeated):
    rng = random.Random(seed)
    shapes = PROBES * 3 if repeated else [*PROBES, (1, 2 * MIB), (64, 64 * KIB), (4096, 128 * MIB)]
    samples = [Sample(*shape, true_direct(engine, *shape) * rng.uniform(0.85, 1.2)) for shape in shapes]
    hiccup = rng.randrange(1, len(samples))
    samples[hiccup] = samples[hiccup]._replace(seconds=samples[hiccup].seconds * 50)
    found = fit(samples)
    wrong = [true_direct(found, *shape) / true_direct(engine, *shape) for shape in shapes]
    assert 0.6 < statistics.median(wrong) < 1.7
    assert not repeated or 0.6 < min(wrong) <= max(wrong) < 1.7


anything = st.one_of(
    st.floats(),
    st.just(0.0),
    st.just(math.nan),
    st.just(math.inf),
    between(1e-12, 1e12),
    st.floats(max_value=0),
)


@given(st.lists(st.builds(Sample, st.integers(-5, 2**70), st.integers(-5, 2**70), anything), max_size=12))
def test_no_probe_is_absurd_enough_to_break_it(samples):
    for rate in astuple(fit(samples)):
        assert math.isfinite(rate)
        assert 0 < rate < 1e15


def test_what_the_probes_do_not_show_stays_as_it_is_assumed():
    assert fit([]) == DEFAULT_RATES
    assert fit([Sample(0, 0, 1.0), Sample(1, 10, math.nan), Sample(1, 10, -1.0)]) == DEFAULT_RATES
    found = fit([Sample(1, 1 << 30, (1 << 30) / 50e9)])
    assert found.bytes_per_s == pytest.approx(50e9, rel=0.05)
    assert found.seconds_per_copy == pytest.approx(DEFAULT_RATES.seconds_per_copy, rel=0.1)


# --- a link, stage by stage -------------------------------------------------------------------------


@dataclass
class TrueLink:
    """A link as it is: nobody knows these numbers but the test."""

    engine: EngineRates
    pack: float
    unpack: float
    round_trip_s: float

    def direct(self, copies: int, total_bytes: int) -> float:
        return true_direct(self.engine, copies, total_bytes)

    def packed(self, total_bytes: int, chunks: int) -> float:
        """When the last of the chunks is unpacked: three stages in a row, each busy with one at a time."""
        size = total_bytes / chunks
        packed_at = moved_at = unpacked_at = 0.0
        for _ in range(chunks):
            packed_at += size / self.pack
            moved_at = max(packed_at, moved_at) + self.direct(1, size)
            moved_at += self.round_trip_s / 2
            unpacked_at = max(moved_at, unpacked_at) + size / self.unpack
        return unpacked_at

    def measured(self, off: list[float]) -> LinkCost:
        """The model of it after a calibration that was off by these factors."""
        engine = EngineRates(*(value * by for value, by in zip(astuple(self.engine), off[:3], strict=True)))
        return LinkCost(engine, self.pack * off[3], self.unpack * off[4], self.round_trip_s * off[5])


links = st.builds(TrueLink, rates, between(1e9, 2e12), between(1e9, 2e12), between(3e-5, 4e-3))


@given(links, st.integers(1, 40), st.integers(1, 1 << 34))
def test_a_pipeline_takes_what_its_stages_take(link, chunks, total_bytes):
    found = link.measured([1.0] * 6).predict_packed(total_bytes, chunks)
    true = link.packed(total_bytes, chunks)
    # A chunk's fixed costs can hide behind a slower stage, and the model never lets them.
    fixed = link.engine.seconds_per_batch + link.engine.seconds_per_copy + link.round_trip_s / 2
    assert true * (1 - 1e-9) <= found <= true + chunks * fixed


@given(links, st.integers(1, 10**6), st.integers(1, 1 << 34), st.integers(1, 99))
def test_the_cheaper_path_is_taken_and_both_are_foretold(link, copies, total_bytes, chunks):
    cost = link.measured([1.0] * 6)
    direct_s, packed_s = (
        cost.predict_direct(copies, total_bytes),
        cost.predict_packed(total_bytes + 64, chunks),
    )
    assert direct_s == pytest.approx(link.direct(copies, total_bytes))
    cheaper = "packed" if packed_s < direct_s else "direct"
    assert cost.choose(copies, total_bytes, total_bytes + 64, chunks) == cheaper


def test_where_nothing_was_measured_the_copies_decide():
    for total_bytes in (1, MIB, 1 << 40):
        for copies, path in (
            (1, "direct"),
            (PACKED_FROM_COPIES - 1, "direct"),
            (PACKED_FROM_COPIES, "packed"),
        ):
            assert LinkCost().choose(copies, total_bytes, total_bytes, 1) == path


# --- what is reported of a link -----------------------------------------------------------------------


FAST_PACK = TrueLink(EngineRates(1e-4, 5e-6, 2e11), 1e12, 1e12, 4e-4)
SHAPE = (8000, 128 * MIB, 128 * MIB, 2)


def test_what_it_says_is_finite_and_one_line():
    cost = FAST_PACK.measured([1.0] * 6)
    known = json.loads(json.dumps(cost.as_metrics()))
    assert all(math.isfinite(value) for value in known.values())
    assert "\n" not in cost.describe()


def test_rates_that_are_not_known_are_the_assumed_ones():
    known = LinkCost(DEFAULT_RATES, DEFAULT_PACK_BYTES_PER_S, DEFAULT_PACK_BYTES_PER_S, DEFAULT_ROUND_TRIP_S)
    assert LinkCost(DEFAULT_RATES).as_metrics() == known.as_metrics()


def test_a_median_of_three_is_what_a_probe_says():
    shape = (1, 1 << 30)
    found = fit([Sample(*shape, seconds) for seconds in (0.1, 0.1, 9.0)])
    assert true_direct(found, *shape) == pytest.approx(statistics.median((0.1, 0.1, 9.0)), rel=0.05)
