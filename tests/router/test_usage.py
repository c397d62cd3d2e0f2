"""The count of cached tokens, in the usage of every kind of answer."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.bodies import WholeEvents
from kvconnect.router.usage import PromptCounts, has_counts, with_counts


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


@pytest.mark.parametrize("kind", OWN)
def test_each_kind_of_usage(kind):
    for counts, wanted in ((COUNTS, TOLD), (PromptCounts(None, None), OWN)):
        raw = json.dumps(OWN[kind]).encode()
        assert has_counts(raw)
        assert json.loads(with_counts(raw, counts)) == wanted[kind]


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


@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_a_stream_is_told_however_it_is_cut_and_no_event_waits_for_the_next(cuts):
    whole, told, given = WholeEvents(is_stream=True), b"", 0
    for begin, end in itertools.pairwise([0, *cuts, len(STREAM)]):
        events, given = whole.take(STREAM[begin:end], is_end=False), end
        told += with_counts(events, COUNTS) if has_counts(events) else events
        assert told.count(b"\n\n") == STREAM[:given].count(b"\n\n")
    assert whole.take(b"x", is_end=True) == b"x"
    assert told == STREAM.replace(b'"cached_tokens":8', b'"cached_tokens":3')


def test_an_answer_that_is_no_stream_is_whole_at_its_end():
    whole = WholeEvents(is_stream=False)
    assert whole.take(b"a\n\n", is_end=False) == b""
    assert whole.take(b"b", is_end=True) == b"a\n\nb"


@pytest.mark.parametrize("raw", [b"", b"no JSON", b'{"usage":{"cached_tokens"', b'["cached_tokens"]'])
def test_what_is_no_answer_passes_unchanged(raw):
    assert with_counts(raw, COUNTS) == raw
