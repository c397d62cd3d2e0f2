"""Of two streams one: the first token from the prefill node, the rest from the decode node."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.router.endpoints import SPLIT
from kvconnect.router.first_answer import (
    Differs,
    RestOfStream,
    has_no_output,
    is_eligible,
    is_one_token,
    read_first,
)

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = st.text(alphabet='ab é\n"\\', min_size=1, max_size=4)


def answer(text, *, chat, finish="length", logprobs=None, **more):
    """What P answers that was asked for one token."""
    ends = {"finish_reason": finish, "stop_reason": None, "logprobs": logprobs, "token_ids": [5]}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"id": "x", "created": 7, "model": "m", "choices": [{**choice, **ends, **more}], "usage": {"p": 1}}


def stream(texts, *, chat, created=9, logprobs=False):
    """D's events for these deltas."""
    head = {"id": "x", "object": "o", "created": created, "model": "m"}
    events = []
    if chat:
        delta = {"role": "assistant", "content": ""}
        events.append({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    for number, text in enumerate(texts):
        ends = {"finish_reason": "stop" if number == len(texts) - 1 else None}
        if logprobs:
            ends["logprobs"] = (
                {"content": [number]} if chat else {"tokens": [number], "text_offset": [number]}
            )
        shown = {"delta": {"content": text}} if chat else {"text": text}
        events.append({**head, "choices": [{"index": 0, **shown, **ends}]})
    events.append({**head, "choices": [], "usage": {"completion_tokens": len(texts)}})
    written = [f"data: {json.dumps(one, separators=(',', ':'), ensure_ascii=False)}\n\n" for one in events]
    return "".join([*written, "data: [DONE]\n\n"]).encode()


def read(raw):
    """The events of a client's stream."""
    blocks = raw.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def texts_of(events):
    shown = [choice for event in events for choice in event["choices"]]
    return [(one.get("delta") or {}).get("content", "") if "delta" in one else one["text"] for one in shown]


@given(
    st.lists(WORDS, min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 400), max_size=30),
)
def test_both_streams_together_are_one_however_they_are_cut(words, joined, late, chat, logprobs, cuts):
    """``joined``: so many tokens come with D's first event; ``late``: characters that come after theirs."""
    whole = "".join(words)
    places = [len("".join(words[:count])) for count in range(1, len(words) + 1)]
    shown = [max(0, place - late) for place in places[:-1]] + [len(whole)]
    shown = shown[min(joined, len(shown)) - 1 :]
    deltas = [whole[begin:end] for begin, end in zip([0, *shown], shown, strict=False)]
    first = read_first(answer(words[0], chat=chat, logprobs={"content": [0]} if logprobs else None), {})
    assert (first.token, first.is_whole) == (5, False)
    rest = RestOfStream(first, has_logprobs=logprobs)
    raw = stream(deltas, chat=chat, logprobs=logprobs)
    edges = [0, *sorted({min(cut, len(raw)) for cut in cuts}), len(raw)]
    got = b"".join(rest.take(raw[begin:end]) for begin, end in itertools.pairwise(edges))
    events = read(first.sent + got)
    assert "".join(texts_of(events)) == whole
    assert sum("role" in choice.get("delta", ()) for event in events for choice in event["choices"]) == chat
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "stop"
    assert events[-1]["usage"] == {"completion_tokens": len(deltas)}, "once"
    if logprobs:
        rows = [choice["logprobs"] for event in events[1 + chat :] for choice in event["choices"]]
        assert [row for one in rows for row in next(iter(one.values()))] == list(range(1, len(deltas)))


def test_what_follows_the_first_token_passes_as_it_is_but_for_its_time():
    rest = RestOfStream(read_first(answer("a", chat=False), {}), has_logprobs=False)
    raw = stream(["a", '"created":9'], chat=False)
    events = read(rest.take(raw[:150]) + rest.take(raw[150:]))
    assert texts_of(events) == ['"created":9']
    assert {event["created"] for event in events} == {7}
    assert rest.take(b"cut off") + rest.take(b"") == b"cut off", "what broke off is not kept back"


def test_another_first_token_of_d_is_seen():
    rest = RestOfStream(read_first(answer("a", chat=True), {}), has_logprobs=False)
    with pytest.raises(Differs, match="begins with 'b'"):
        rest.take(stream(["b", "c"], chat=True))


def test_an_error_of_d_is_for_the_client():
    rest = RestOfStream(read_first(answer("a", chat=True), {}), has_logprobs=False)
    raw = b'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n'
    assert rest.take(raw) == raw


@pytest.mark.parametrize(
    ("given", "body"),
    [
        (answer("", chat=False), {}),
        (answer("\ufffd", chat=False), {}),
        (answer("one of", chat=True), {"stop": ["xyz", "off"]}),
        (answer("one of", chat=False), {"stop": "fa"}),
        (answer("a", chat=True, message={"role": "assistant", "content": "a", "reasoning": "b"}), {}),
        (answer("a", chat=True, message={"role": "assistant", "content": None, "tool_calls": [{}]}), {}),
        (answer("a", chat=False, token_ids=None), {}),
        (answer("a", chat=False, token_ids=[1, 2]), {}),
        ({"choices": []}, {}),
        ({"choices": "no"}, {}),
        ({}, {}),
    ],
)
def test_text_that_does_not_stand_for_itself_is_left_to_d(given, body):
    assert read_first(given, body) is None


def test_a_stop_string_that_cannot_begin_here_holds_nothing_back():
    assert read_first(answer("one of", chat=True), {"stop": ["one of", "z", 3]}).text == "one of"


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_ends_with_its_first_token_is_whole(chat):
    body = {"stream_options": {"include_usage": True}}
    first = read_first(answer("", chat=chat, finish="stop", stop_reason=9), body)
    assert first.is_whole
    *_, last, usage = read(first.sent)
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["stop_reason"]) == ("stop", 9)
    assert (usage["choices"], usage["usage"]) == ([], {"p": 1})
    assert b"usage" not in read_first(answer("", chat=chat, finish="stop"), {}).sent


@pytest.mark.parametrize(
    ("path", "more", "expected"),
    [
        (TEXT, {}, True),
        (CHAT, {"stop": ["a"], "seed": 3, "logprobs": True, "top_logprobs": 2}, True),
        (TEXT, {"stream_options": {"include_usage": True}}, True),
        (TEXT, {"stream_options": {"continuous_usage_stats": True}}, False),
        (TEXT, {"stream_options": 3}, False),
        (TEXT, {"n": 2}, False),
        (TEXT, {"prompt": ["a", "b"]}, False),
        (TEXT, {"echo": True}, False),
        (TEXT, {"echo": False}, True),
        (CHAT, {"tools": []}, False),
        (TEXT, {"prompt_logprobs": 1}, False),
        (TEXT, {"use_beam_search": True}, False),
        (TEXT, {"what_comes_next": 1}, False),
        ("/v1/responses", {}, False),
    ],
)
def test_what_was_tried_may_begin_with_ps_token(path, more, expected):
    assert (
        is_eligible(path, {"model": "m", "prompt" if path == TEXT else "messages": "x", **more}) == expected
    )


def test_one_token_is_all_that_some_want():
    chat = SPLIT[CHAT]
    assert is_one_token(chat, {"max_tokens": 1})
    assert is_one_token(chat, {"max_tokens": 9, "max_completion_tokens": 1})
    assert not is_one_token(chat, {"max_tokens": 2})
    assert not is_one_token(chat, {"max_tokens": True})
    assert not is_one_token(chat, {"max_tokens": 1, "n": 2})
    assert not is_one_token(chat, {})


def of_choice(**choice):
    return b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n"


ROLE = of_choice(delta={"role": "assistant", "content": ""}, logprobs=None, finish_reason=None)
COUNTS = b'data: {"choices": [], "usage": {"completion_tokens": 0}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("beginning", [b"", ROLE, COUNTS, ROLE + COUNTS, COUNTS + DONE, of_choice(text="")])
@pytest.mark.parametrize(
    "output",
    [
        of_choice(text="a"),
        of_choice(text="", token_ids=[7]),
        of_choice(text="", finish_reason="stop"),
        of_choice(delta={"content": "a"}),
        of_choice(delta={"reasoning": "a"}),
        of_choice(delta={"tool_calls": [{"index": 0}]}),
        b'data: {"error": {"message": "gone"}}\n\n',
        b'event: response.created\ndata: {"type": "response.created"}\n\n',
        b'data: {"cho',
        b"data: [" + b"[" * 100_000 + b"\n\n",
        b'data: {"choices": [1]}\n\n',
    ],
)
def test_a_stream_has_no_output_until_an_event_that_has_some(beginning, output):
    assert has_no_output(beginning)
    assert not has_no_output(beginning + output)
