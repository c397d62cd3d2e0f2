"""The count of cached tokens, in the usage of every kind of answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.usage import CountedByPrefill, PromptCounts


def usages(cached, created, new):
    """Each kind of answer that has a usage of 9 prompt tokens."""
    details = {"cached_tokens": cached, "created_cache_tokens": created}
    more = {"cached_tokens": cached, "cache_write_tokens": created}
    message = {"input_tokens": new, "cache_read_input_tokens": cached, "cache_creation_input_tokens": created}
    return {
        "completion": {"usage": {"prompt_tokens": 9, "prompt_tokens_details": details}},
        "response": {"usage": {"input_tokens_details": {**more, "cached_tokens_per_turn": [cached]}}},
        "response event": {"response": {"usage": {"input_tokens": 9, "input_tokens_details": more}}},
        "message": {"usage": message},
        "message event": {"message": {"usage": message}},
    }


OWN, TOLD = usages(8, 0, 1), usages(3, 4, 2)
COUNTS = PromptCounts(3, 4)


def taken(data, cuts=(), *, is_stream=False, known_at=0, counts=COUNTS):
    counted, parts = CountedByPrefill(is_stream=is_stream), []
    pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    for at, piece in enumerate(pieces):
        parts.append(counted.take(piece, is_end=False, is_known=at >= known_at, counts=counts))
    parts.append(counted.take(b"", is_end=True, is_known=True, counts=counts))
    return parts


@pytest.mark.parametrize("kind", OWN)
def test_each_kind_of_usage(kind):
    for counts, wanted in ((COUNTS, TOLD), (None, OWN), (PromptCounts(None, None), OWN)):
        (got,) = filter(None, taken(json.dumps(OWN[kind]).encode(), counts=counts))
        assert json.loads(got) == wanted[kind]


@pytest.mark.parametrize(
    ("answer", "handed", "counts"),
    [
        *(
            (TOLD[kind], {"remote_prefill_cached_tokens": 5}, COUNTS)
            for kind in ("completion", "response", "message")
        ),
        ({"usage": {"prompt_tokens": 9}}, {"remote_prefill_cached_tokens": 5}, PromptCounts(5, None)),
        ({"usage": {"prompt_tokens_details": None}}, {}, PromptCounts(None, None)),
        ({"usage": [1]}, {"remote_prefill_cached_tokens": "5"}, PromptCounts(None, None)),
        ({}, {}, PromptCounts(None, None)),
    ],
)
def test_the_prefill_nodes_counts(answer, handed, counts):
    assert PromptCounts.of(answer, handed) == counts


def test_an_answer_that_has_no_counts_gets_none():
    for usage in ({"prompt_tokens": 9, "prompt_tokens_details": None}, {"input_tokens": 9}, {}):
        told = dict(usage)
        COUNTS.put_into(told)
        assert told == usage


STREAM = (
    b'data: {"choices":[{"text":"\\"cached_tokens\\":1"}]}\n\n'
    b'event: x\ndata: {"usage":{"prompt_tokens_details":{"cached_tokens":8}},"text":"\xc3\xbc"}\n\n'
    b'data: {"last":1}\n\ndata: [DONE]\n\n'
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted), st.integers(0, 7))
def test_a_stream_is_told_however_it_is_cut_and_whenever_the_count_is_known(cuts, known_at):
    parts = taken(STREAM, cuts, is_stream=True, known_at=known_at)
    assert b"".join(parts) == STREAM.replace(b'"cached_tokens":8', b'"cached_tokens":3')


def test_events_before_the_first_count_do_not_wait():
    counted = CountedByPrefill(is_stream=True)
    assert counted.take(b"data: {}\n\ndata: {", is_end=False, is_known=False, counts=None) == b"data: {}\n\n"


@pytest.mark.parametrize("raw", [b"", b"no JSON", b'{"usage":{"cached_tokens"', b'["cached_tokens"]'])
def test_what_is_no_answer_passes_unchanged(raw):
    assert b"".join(taken(raw)) == raw
