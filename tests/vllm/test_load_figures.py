"""What requests under load come to, without a server."""

from __future__ import annotations

import math

import pytest

from kvconnect.node.children import parse_metrics
from tests.vllm.load_figures import (
    Load,
    Sample,
    bucket_quantile,
    buckets,
    figures,
    grown,
    over_rounds,
)

METRICS = """\
# TYPE vllm:kvconnect_load_seconds histogram
vllm:kvconnect_load_seconds_bucket{engine="0",le="0.01",model_name="tiny"} 8.0
vllm:kvconnect_load_seconds_bucket{engine="0",le="0.1",model_name="tiny"} 9.0
vllm:kvconnect_load_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 10.0
vllm:kvconnect_load_seconds_bucket{engine="1",le="0.01",model_name="tiny"} 1.0
vllm:kvconnect_load_seconds_bucket{engine="1",le="0.1",model_name="tiny"} 2.0
vllm:kvconnect_load_seconds_bucket{engine="1",le="+Inf",model_name="tiny"} 2.0
vllm:kvconnect_load_seconds_sum{engine="0",model_name="tiny"} 1.5
vllm:other_load_seconds_bucket{le="0.01"} 7.0
"""


@pytest.mark.parametrize("text", ["8192", "1:2:3:4", "x:1:1", "0:1:1", "1:0:1", "1:1:0", "1:1:-2", ""])
def test_other_loads_are_refused(text):
    with pytest.raises(ValueError):
        Load.parse(text)


def test_histograms_are_summed_over_labels():
    found = buckets(parse_metrics(METRICS), "vllm:kvconnect_load_seconds")
    assert found == {0.01: 9, 0.1: 11, math.inf: 12}
    assert list(found) == sorted(found)
    assert grown({0.01: 4, 0.1: 5, math.inf: 5}, found) == {0.01: 5, 0.1: 6, math.inf: 7}
    assert grown({}, found) == found
    assert buckets(parse_metrics(METRICS), "vllm:none") == {}


def test_what_is_beyond_all_buckets_or_in_none():
    assert bucket_quantile({0.01: 1, math.inf: 4}, 0.9) == 0.01
    assert math.isnan(bucket_quantile({0.01: 0, math.inf: 0}, 0.5))


def served(first_token_s, decode_s=0.1, ended_s=1.0, prefill_s=0.2, gaps_s=(0.01, 0.02)):
    return Sample(ended_s, 0.001, prefill_s, decode_s, first_token_s, gaps_s)


def test_figures_of_a_run():
    samples = [served(0.3), served(0.5, decode_s=0.301), served(0.4, ended_s=4.0)]
    samples.append(Sample(2.0, 0.002, error="D: HTTP 500", detail="D: HTTP 500 no"))
    told = figures(samples, {0.01: 8, 0.02: 9, 0.1: 10, math.inf: 10}, tokens_out=8)
    assert told["first_token_ms"] == {"p50": 400, "p90": 500, "p99": 500}
    assert told["second_token_ms"] == {"p50": 10, "p90": 10, "p99": 10}
    assert told["decode_gap_ms"] == {"p50": 10, "p90": 20, "p99": 20}
    assert told["prefill_leg_ms"]["p50"] == 200
    # Spread evenly in their bucket.
    assert told["load_ms"] == {"p50": 6.25, "p90": 20, "p99": 92}
    assert told["loads"] == 10
    assert (told["requests"], told["failed"], told["failures"]) == (4, 1, {"D: HTTP 500": 1})
    assert (told["requests_per_s"], told["tokens_per_s"]) == (0.75, 6)
    assert told["errors"] == ["D: HTTP 500 no"]
    assert told["client_late_ms"]["p99"] == 2


def test_medians_of_rounds_and_sums_of_counts():
    rounds = [figures([served(first)], {0.01: 1, math.inf: 1}, 3) for first in (0.3, 0.9, 0.4)]
    rounds.append(figures([Sample(2.0, error="P: timeout", detail="P: timeout")], {}, 3))
    told = over_rounds(rounds)
    assert told["first_token_ms"]["p50"] == 400
    assert told["requests_per_s"] == 1
    assert (told["rounds"], told["requests"], told["failed"], told["loads"]) == (4, 4, 1, 3)
    assert (told["failures"], told["errors"]) == ({"P: timeout": 1}, ["P: timeout"])
