"""Receipts: signed as JSON, and refused once anything in them was changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import PeerError
from kvconnect.receipt import LoadPart, Receipt, sign, verify

SECRET = b"what this cluster signs with"
COUNTS = st.integers(0, 1 << 40)
ORIGINS = st.sampled_from(["device", "host", "disk", "store", "peer", "computed"])
LOADS = st.builds(
    LoadPart, origin=ORIGINS, tokens=COUNTS, ended=st.text(max_size=20), bytes=COUNTS, us=COUNTS
)


@st.composite
def receipts(draw):
    tokens = draw(st.dictionaries(ORIGINS, COUNTS))
    return Receipt(
        request_id=draw(st.text(max_size=40)),
        engine_id=draw(st.text(max_size=40)),
        prompt=draw(st.binary(max_size=16)).hex(),
        prompt_tokens=sum(tokens.values()),
        tokens=tokens,
        issued_at=draw(COUNTS),
        version=1,
        loads=tuple(draw(st.lists(LOADS, max_size=3))),
        delivered=draw(st.booleans()),
    )


@given(receipts())
def test_a_receipt_survives_json_and_a_gateway_that_sorts_its_keys(receipt):
    signed = sign(receipt, SECRET)
    travelled = json.loads(json.dumps(signed, sort_keys=True, indent=2))
    assert verify(travelled, SECRET) == receipt


def paths(value, at=()):
    """The place of every leaf in a JSON value."""
    if isinstance(value, dict) and value:
        return [path for key, inner in value.items() for path in paths(inner, (*at, key))]
    if isinstance(value, list) and value:
        return [path for key, inner in enumerate(value) for path in paths(inner, (*at, key))]
    return [at]


@given(receipts(), st.data())
def test_any_change_is_refused(receipt, data):
    signed = json.loads(json.dumps(sign(receipt, SECRET)))
    *way, last = data.draw(st.sampled_from(paths(signed)))
    place = signed
    for step in way:
        place = place[step]
    old = place[last]
    place[last] = data.draw(st.one_of(st.none(), st.text(), COUNTS).filter(lambda new: new != old))
    with pytest.raises(PeerError):
        verify(signed, SECRET)


@pytest.mark.parametrize(
    ("given", "secret", "why"),
    [
        (None, SECRET, "an object"),
        ([], SECRET, "an object"),
        ({}, SECRET, "no signature"),
        ({"signature": 7}, SECRET, "no signature"),
        ({"signature": ""}, SECRET, "no signature"),
        ({"signature": "00"}, SECRET, "signature is wrong"),
        ({"signature": "ä"}, SECRET, "signature is wrong"),
        ({"signature": "\ud800"}, SECRET, "signature is wrong"),
        ({"signature": "00", "x": float("nan")}, SECRET, "is no JSON"),
        ({"signature": "00", "x": "y" * 20_000}, SECRET, "bytes of JSON"),
        ({"signature": "00"}, b"", "signature is wrong"),
    ],
)
def test_what_is_no_receipt_is_refused_with_a_reason(given, secret, why):
    with pytest.raises(PeerError, match=why):
        verify(given, secret)


def of_three_tokens(prompt_tokens):
    names = dict.fromkeys(("request_id", "engine_id", "prompt"), "")
    return Receipt(**names, prompt_tokens=prompt_tokens, tokens={"computed": 3}, issued_at=0, version=1)


def test_a_receipt_of_another_key_or_without_one_is_refused():
    receipt = of_three_tokens(3)
    with pytest.raises(PeerError, match="another key"):
        verify(sign(receipt, b"another"), SECRET)
    with pytest.raises(PeerError, match="no signature"):
        verify(sign(receipt, b""), SECRET)


def test_tokens_that_do_not_add_up_are_refused_though_signed():
    receipt = of_three_tokens(4)
    with pytest.raises(PeerError, match="add up to 3, not 4"):
        verify(sign(receipt, SECRET), SECRET)
