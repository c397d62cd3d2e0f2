"""Handles: only whole ones of our own cluster, in their time, from the address that they name."""

from __future__ import annotations

import base64
import hashlib
import hmac
import string

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvconnect.addresses import RankAddress
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError, PeerError
from kvconnect.halves.building import Trust, build_scheduler_half
from kvconnect.outcome import Cause
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.handles import LONGEST_HANDLE, MOST_SKEW_S, Claims, Handles, PeerTrust
from kvconnect.transfer.params import HANDLE_KEY, PEER_KEY, TRANSFER_KEY, read_remote_prefill
from tests.halves.test_scheduler_half import ATTENTION, HANDLES, Request, connector, prefilled

CACHE = KVCacheConfig(100, (ATTENTION,))
SECRET = b"a secret of 32 bytes, or of any "
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)
CLAIMS = st.builds(
    Claims,
    engine_id=NAMES,
    epoch=NAMES,
    name=NAMES,
    num_tokens=st.integers(1, 2**31 - 1),
    host=st.text("abcXYZ019._:-", min_size=1, max_size=40),
    port=st.integers(1, 65535),
    expires_at=st.floats(0, 1e10),
)
CLAIM = Claims("P", "epoch", "name", 40, "10.0.0.1", 5600, 1000.0)


def at(now, secret=SECRET):
    return Handles(secret, lambda: now)


@given(CLAIMS, st.sampled_from([SECRET, b""]))
def test_what_was_said_is_what_is_read(claims, secret):
    handle = at(0, secret).make(claims)
    assert len(handle) <= LONGEST_HANDLE
    assert at(claims.expires_at, secret).read(handle) == claims


def test_the_code_is_hmac_sha256_over_version_and_content():
    version, text = at(0).make(CLAIM).split(".")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    code, payload = data[:32], data[32:]
    assert code == hmac.new(SECRET, version.encode() + b"." + payload, hashlib.sha256).digest()
    assert msgspec.msgpack.decode(payload) == ["P", "epoch", "name", 40, "10.0.0.1", 5600, 1000.0, b"", b""]


@pytest.mark.parametrize("engine_id", ["P", "PP", "PPP"])
def test_a_handle_has_one_spelling(engine_id):
    handle = at(0).make(msgspec.structs.replace(CLAIM, engine_id=engine_id))
    for last in string.ascii_letters + string.digits + "-_":
        if last != handle[-1]:
            with pytest.raises(PeerError):
                at(0).read(handle[:-1] + last)


HANDLE = at(0).make(CLAIM)
PLACES = st.integers(0, len(HANDLE) - 1)
FLIPPED = st.builds(
    lambda place, bit: HANDLE[:place] + chr(ord(HANDLE[place]) ^ (1 << bit)) + HANDLE[place + 1 :],
    PLACES,
    st.integers(0, 6),
)
CUT = st.builds(lambda start, end: HANDLE[start:end], PLACES, PLACES)
LONGER = st.text("Az09-_=.", min_size=1, max_size=8).map(lambda more: HANDLE + more)
MADE_UP = st.binary(max_size=300).map(lambda data: "s3." + base64.urlsafe_b64encode(data).decode())


@given(FLIPPED | CUT | LONGER | MADE_UP | st.text(max_size=600))
def test_no_other_text_is_a_handle(text):
    with pytest.raises(PeerError):
        at(0).read(text)


@given(CLAIMS, st.binary(min_size=1, max_size=40))
def test_a_handle_of_another_secret_is_refused(claims, other):
    assume(other != SECRET)
    with pytest.raises(PeerError, match="the prefill node has another key"):
        at(0).read(at(0, other).make(claims))


def test_signed_and_unsigned_nodes_say_what_is_wrong_between_them():
    with pytest.raises(PeerError, match="prefill node is insecure, this one has keys"):
        at(0).read(at(0, b"").make(CLAIM))
    with pytest.raises(PeerError, match="prefill node has keys, this one is insecure"):
        at(0, b"").read(at(0).make(CLAIM))


def test_a_forger_without_the_secret_cannot_relabel_an_unsigned_handle():
    with pytest.raises(PeerError, match="signature is wrong"):
        at(0).read("s3." + at(0, b"").make(CLAIM)[3:])


@given(st.floats(0, 1e6))
def test_a_handle_expires(late_s):
    handles = at(CLAIM.expires_at + late_s)
    if late_s <= MOST_SKEW_S:
        assert handles.read(at(0).make(CLAIM)) == CLAIM
    else:
        with pytest.raises(PeerError, match="expired"):
            handles.read(at(0).make(CLAIM))
        assert handles.read(at(0).make(CLAIM), even_expired=True) == CLAIM


@pytest.mark.parametrize(
    "payload",
    [
        *map(msgspec.msgpack.encode, ([], ["P"], [*msgspec.to_builtins(CLAIM), 1], {"a": 1})),
        msgspec.msgpack.encode(["P", "e", "n", 0, "h", 1, 0.0]),
        msgspec.msgpack.encode(CLAIM).replace(b"P", b"\xff", 1),
    ],
)
def test_content_of_another_shape_is_refused_even_if_it_is_signed(payload):
    code = hmac.digest(SECRET, b"s3." + payload, "sha256")
    text = base64.urlsafe_b64encode(code + payload).decode().rstrip("=")
    with pytest.raises(PeerError, match="content cannot be read"):
        at(0).read("s3." + text)


@pytest.mark.parametrize("length", range(232, 260))
def test_a_scheduler_that_starts_can_sign_a_prompt_of_any_length(length):
    """What a handle has no room for must be refused before the first request, whatever its length is."""
    config = parse_kv_transfer_config({"kv_role": "kv_producer", "engine_id": "e" * length})
    try:
        prefill = build_scheduler_half(
            config, CACHE, directory=(RankAddress(0, "10.0.0.1", 5600),), trust=Trust(HANDLES)
        )
    except ConfigError as error:
        assert f"engine_id {config.engine_id!r} and host '10.0.0.1' make handles of" in str(error)
        assert "accepted: 512" in str(error)
        return
    request = Request("p", 2**31 - 1, {"do_remote_decode": True, TRANSFER_KEY: "t"})
    prefill.new_request(request)
    assert prefill.request_finished(request, ([1],), delivered=True)[0]


# --- in the hands of both scheduler halves --------------------------------------------------------


def test_handles_of_one_engine_share_its_epoch_and_nothing_else_that_is_random():
    prefill, claims = connector("kv_producer"), []
    for name in ("a", "b"):
        request = Request(name, 41, {"do_remote_decode": True})
        _, params = prefill.request_finished(request, ([1, 2, 3],), delivered=True)
        claims.append(HANDLES.read(params[HANDLE_KEY]))
    assert claims[0].epoch == claims[1].epoch
    assert len({claims[0].epoch, claims[0].name, claims[1].name}) == 3


def test_a_handle_that_was_signed_for_one_transfer_id_is_none_for_another():
    prefill = connector("kv_producer")
    request = Request("p", 41, {"do_remote_decode": True, TRANSFER_KEY: "t-1"})
    prefill.new_request(request)
    _, params = prefill.request_finished(request, ([1, 2, 3],), delivered=True)
    assert read_remote_prefill(params, HANDLES).handle == "transfer:t-1"
    for other in ("t-2", None, 7):
        refusal = read_remote_prefill({**params, TRANSFER_KEY: other}, HANDLES).refusal
        assert "kv_transfer_params.transfer_id is" in refusal.text


def refused(trust, **change):
    """Why a request with a signed handle, changed, may not be fetched by a D that trusts so."""
    _, _, params = prefilled()
    remote = read_remote_prefill({**params, **change}, HANDLES)
    return str(remote.refusal or trust.refusal(*remote.peer[1:], vouched=remote.vouched) or "")


ANNOUNCED = {
    "do_remote_prefill": True,
    TRANSFER_KEY: "t",
    HANDLE_KEY: None,
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}


def test_a_transfer_id_alone_is_fetched_from_loopback_and_from_who_a_handle_named():
    trust = PeerTrust(AllowList(()), 4)
    assert "10.0.0.1:5600, which no signed handle has named" in refused(trust, **ANNOUNCED)
    assert refused(trust, **{**ANNOUNCED, "remote_host": "127.0.0.1"}) == ""
    assert refused(trust) == "", "a signed handle"
    assert refused(trust, **ANNOUNCED) == "", "the same peer, now known"
    assert "10.0.0.1:5601" in refused(trust, **{**ANNOUNCED, "remote_port": 5601})


def test_what_handles_named_is_bounded():
    trust = PeerTrust(AllowList(()), 4)
    for port in range(1, 100):
        assert trust.refusal("10.0.0.1", port, vouched=True) is None
    known = [port for port in range(1, 100) if not trust.refusal("10.0.0.1", port, vouched=False)]
    assert known == [96, 97, 98, 99]


def test_a_router_vouches_for_an_address_with_an_older_handle():
    _, _, params = prefilled()
    trust = PeerTrust(AllowList(()), 4)
    later = Handles(HANDLES._secret, lambda: 1e9)
    announced = {**ANNOUNCED, PEER_KEY: params[HANDLE_KEY]}
    remote = read_remote_prefill(announced, later)
    assert trust.refusal(*remote.peer[1:], vouched=remote.vouched) is None
    assert (
        "remote_port is 5601, its handle says 5600"
        in read_remote_prefill({**announced, "remote_port": 5601}, later).refusal.text
    )
    assert (
        "kvconnect_peer is of no use"
        in read_remote_prefill({**announced, PEER_KEY: "s3.AAAA"}, later).refusal.text
    )


def test_an_allow_list_is_all_that_counts():
    trust = PeerTrust(AllowList(["10.0.0.2"]), 4)
    assert "which kv_connector_extra_config.allow_peers does not have" in refused(trust)
    assert "allow_peers" in refused(trust, **{**ANNOUNCED, "remote_host": "127.0.0.1"})
    assert refused(PeerTrust(AllowList(["10.0.0.0/30:5600"]), 4)) == ""


def test_a_refused_address_fails_the_load_by_policy_and_is_counted():
    half = connector("kv_consumer", trust=PeerTrust(AllowList(["10.0.0.2"]), 4))
    _, _, params = prefilled()
    request = Request("d", 40, params)
    half.new_request(request)
    half.update_after_alloc(request, ([7, 8, 9],), 40)
    orders = half.build_orders()
    (load,) = orders.loads
    assert "allow_peers" in load.refusal.text
    assert (load.peer[1:], load.handle) == (("", 0), "")
    assert load.refusal.cause is Cause.NOT_TRUSTED, "the worker counts it, once"
    assert not orders.failures


def test_unsigned_handles_vouch_for_nothing():
    unsigned = Handles()
    remote = read_remote_prefill({"do_remote_prefill": True, HANDLE_KEY: unsigned.make(CLAIM)}, unsigned)
    assert not remote.vouched
    trust = PeerTrust(AllowList(()), 4)
    assert "no signed handle" in trust.refusal(*remote.peer[1:], vouched=remote.vouched).text
