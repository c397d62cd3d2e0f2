"""Requests between ranks of SGLang servers, as its schedulers drive them, without SGLang."""

from __future__ import annotations

import numpy as np
import pytest

from kvconnect.outcome import Cause
from kvconnect.sglang.room_ledger import BOOTSTRAPPING, FAILED, SUCCESS, TRANSFERRING, WAITING_FOR_INPUT
from kvconnect.transfer.orders import Results
from tests.sglang_contract.ranks import Rank, asked, ended, pages, until

P_PAGES, D_PAGES = (5, 9, 2, 7), (3, 11, 6, 1)


@pytest.fixture
def ranks():
    made = []

    def make(*arguments, **more):
        made.append(Rank(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def pair(ranks):
    prefill, decode = ranks("kv_producer", 12), ranks("kv_consumer", 17)
    prefill.fill(1)
    return prefill, decode


def same(prefill, decode, sources, targets):
    return all(
        (a[list(sources)] == b[list(targets)]).all() for a, b in zip(prefill.kv, decode.kv, strict=True)
    )


def begin(prefill, decode, number=77, first_token=0, targets=D_PAGES, states=None, aux=4):
    """A request on both sides, whose pages D has allocated."""
    of_p, of_d = prefill.ledger.open_prefill(number), decode.room(number, prefill)
    assert prefill.ledger.poll_prefill(of_p) == BOOTSTRAPPING
    assert decode.ledger.poll_decode(of_d) == WAITING_FOR_INPUT
    decode.ledger.load(of_d, pages(*targets), states, aux, first_token)
    asked(prefill, of_p)
    of_p.num_pages = len(targets)
    return of_p, of_d


def test_a_request_moves_with_its_rows(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    assert of_p.first_token == 0
    prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert ended(prefill, of_p) == SUCCESS
    assert same(prefill, decode, P_PAGES, D_PAGES)
    for sent, got in zip(prefill.aux, decode.aux, strict=True):
        assert (got[4] == sent[2]).all()
        assert not got[:4].any()
        assert not got[5:].any()
    untouched = [page for page in range(18) if page not in D_PAGES]
    assert not any(pool[untouched].any() for pool in decode.kv)
    assert not prefill.ledger._prefill
    assert not decode.ledger._decode
    assert prefill.ledger.poll_prefill(of_p) == SUCCESS, "it is remembered"


def test_parts_are_sent_while_the_prompt_is_computed(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    prefill.ledger.send(of_p, pages(*P_PAGES[:2]), None, 2)
    until(lambda: same(prefill, decode, P_PAGES[:2], D_PAGES[:2]), "the first part did not arrive")
    assert decode.ledger.poll_decode(of_d) == prefill.ledger.poll_prefill(of_p) == TRANSFERRING
    assert not any(pool[[6, 1]].any() for pool in decode.kv)
    prefill.ledger.send(of_p, pages(P_PAGES[2]), None, 2)
    prefill.ledger.send(of_p, pages(P_PAGES[3]), None, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert same(prefill, decode, P_PAGES, D_PAGES)


@pytest.mark.parametrize("parts", [(2,), (1, 1)])
def test_what_decode_has_already_is_not_sent(pair, parts):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode, first_token=8, targets=D_PAGES[2:])
    assert of_p.first_token == 8
    at = 2
    for count in parts:
        prefill.ledger.send(of_p, pages(*P_PAGES[at : at + count]), None, 2)
        at += count
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert same(prefill, decode, P_PAGES[2:], D_PAGES[2:])


def test_only_the_rows_travel_where_decode_has_the_whole_prompt(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode, first_token=16, targets=())
    prefill.ledger.send(of_p, pages(), None, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert (decode.aux[0][4] == prefill.aux[0][2]).all()


def test_a_fetch_may_come_before_the_request_does(pair):
    prefill, decode = pair
    of_d = decode.room(5, prefill)
    decode.ledger.poll_decode(of_d)
    decode.ledger.load(of_d, pages(*D_PAGES), None, 4, 0)
    until(lambda: prefill.worker.state()["pending_fetches"])
    of_p = prefill.ledger.open_prefill(5)
    asked(prefill, of_p)
    of_p.num_pages = 4
    prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason


def test_a_second_request_with_a_room_in_use_fails_and_the_first_goes_on(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    again = prefill.ledger.open_prefill(77)
    assert prefill.ledger.poll_prefill(again) == FAILED
    assert "bootstrap_room" in again.reason.text
    prefill.ledger.send(again, pages(1), None, 0)
    prefill.ledger.fail(again)
    twin = decode.room(77, prefill)
    assert decode.ledger.poll_decode(twin) == FAILED
    decode.ledger.abort(twin)
    prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert ended(prefill, of_p) == SUCCESS


def test_nothing_of_an_aborted_prefill_is_used(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    prefill.ledger.send(of_p, pages(*P_PAGES[:2]), None, 2)
    prefill.ledger.fail(of_p)
    assert prefill.ledger.poll_prefill(of_p) == FAILED
    assert ended(decode, of_d) == FAILED
    assert of_d.reason.cause in (Cause.ABORTED, Cause.PREFILL_ENDED)
    assert not prefill.ledger._prefill
    until(lambda: not prefill.worker.state()["expected"])


def test_what_was_packed_before_an_abort_is_not_used_after_it(pair):
    """SGLang aborts between the last chunk's arrival and P's answer, and may have packed other bytes."""
    prefill, decode = pair
    sender = prefill.worker.transfer.prefill.sender
    arrived = sender._arrived

    def arrived_as_it_is_aborted(sending, parcel):
        arrived(sending, parcel)
        prefill.worker.revoke(sending.lease.handle, Cause.ABORTED("the request was aborted"))

    sender._arrived = arrived_as_it_is_aborted
    of_p, of_d = begin(prefill, decode, targets=D_PAGES[:2])
    prefill.ledger.send(of_p, pages(*P_PAGES[:2]), None, 2)
    assert ended(decode, of_d) == FAILED
    assert ended(prefill, of_p) == FAILED


def test_a_prefill_that_is_aborted_once_all_is_sent_never_serves_overwritten_pages(pair):
    prefill, decode = pair
    for number in range(30):
        of_p, of_d = begin(prefill, decode, number=1000 + number)
        prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
        prefill.ledger.fail(of_p)
        kept = [pool.clone() for pool in prefill.kv]
        # SGLang frees the pages at once, and computes another request there.
        for pool in prefill.kv:
            pool.fill_(7.0)
        state = ended(decode, of_d)
        for pool, before in zip(prefill.kv, kept, strict=True):
            pool.copy_(before)
        assert state == FAILED or same(prefill, decode, P_PAGES, D_PAGES)
    until(lambda: not prefill.worker.state()["leases"])


def test_an_aborted_load_has_failed_only_once_its_pages_are_quiescent(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    prefill.ledger.send(of_p, pages(*P_PAGES[:2]), None, 2)
    decode.ledger.abort(of_d)
    assert ended(decode, of_d) == FAILED
    assert not decode.ledger.is_loading(77)
    before = [pool.clone() for pool in decode.kv]
    prefill.ledger.send(of_p, pages(*P_PAGES[2:]), None, 2)
    assert ended(prefill, of_p) in (FAILED, SUCCESS)
    assert all((a == b).all() for a, b in zip(before, decode.kv, strict=True))


def test_a_prefill_fails_when_decode_released_it(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    decode.ledger.abort(of_d)
    assert ended(prefill, of_p) == FAILED
    assert "released" in of_p.reason.text


def test_a_prefill_that_no_decode_node_asks_for_fails_in_time(ranks):
    prefill = ranks("kv_producer", 12, timeout_s=0.05)
    of_p = prefill.ledger.open_prefill(1)
    assert ended(prefill, of_p) == FAILED
    assert "no decode node asked" in of_p.reason.text
    assert not prefill.ledger._prefill


def test_pages_of_a_dead_decode_node_are_free_within_the_lease(ranks):
    prefill, decode = ranks("kv_producer", 12, lease_s=0.5), ranks("kv_consumer", 17)
    of_p, _ = begin(prefill, decode)
    decode.close()
    prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
    assert ended(prefill, of_p) == FAILED or of_p.seconds < 5
    assert not prefill.worker.state()["leases"]


def test_a_dead_prefill_node_fails_its_requests_soon(pair):
    prefill, decode = pair
    _, of_d = begin(prefill, decode)
    prefill.close()
    assert ended(decode, of_d) == FAILED
    assert of_d.reason.cause in (Cause.LOST, Cause.OUT_OF_REACH)


def test_more_pages_than_prefill_has_are_refused(pair):
    prefill, decode = pair
    of_p, of_d = begin(prefill, decode)
    of_p.num_pages = 3
    prefill.ledger.send(of_p, pages(*P_PAGES[:3]), None, 2)
    assert ended(decode, of_d) == FAILED
    assert of_d.reason.cause is Cause.OTHER_PROMPT


def test_rows_of_another_size_fail_the_request(ranks):
    prefill, decode = ranks("kv_producer", 12), ranks("kv_consumer", 17, aux=(64, 16, 999))
    of_p, of_d = begin(prefill, decode)
    prefill.ledger.send(of_p, pages(*P_PAGES), None, 2)
    assert ended(decode, of_d) == FAILED
    assert of_d.reason.cause is Cause.OTHER_LAYOUT


def test_another_model_is_refused_by_name(ranks):
    prefill, decode = ranks("kv_producer", 12), ranks("kv_consumer", 17, model="another")
    of_d = decode.room(1, prefill)
    decode.ledger.poll_decode(of_d)
    decode.ledger.load(of_d, pages(*D_PAGES), None, 4, 0)
    assert ended(decode, of_d) == FAILED
    assert "another" in of_d.reason.text


@pytest.mark.parametrize(
    "shape", [{"heads": None}, {"draft_layers": 1}, {"heads": None, "dsa": True}], ids=str
)
def test_latent_caches_draft_buffers_and_indexers_move(ranks, shape):
    prefill, decode = ranks("kv_producer", 12, **shape), ranks("kv_consumer", 17, **shape)
    prefill.fill(2)
    has_dsa = bool(shape.get("dsa"))
    of_p, of_d = begin(prefill, decode, states=[pages(*D_PAGES)] if has_dsa else [])
    prefill.ledger.send(of_p, pages(*P_PAGES[:2]), None, 2)
    prefill.ledger.send(of_p, pages(*P_PAGES[2:]), [pages(*P_PAGES)] if has_dsa else [], 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert same(prefill, decode, P_PAGES, D_PAGES)
    for a, b in zip(prefill.dsa, decode.dsa, strict=True):
        assert (a[list(P_PAGES)] == b[list(D_PAGES)]).all()


@pytest.mark.parametrize("first_token", [0, 8])
def test_windows_and_states_have_pools_of_their_own(ranks, first_token):
    prefill = ranks("kv_producer", 12, swa_pages=5, slots=4)
    decode = ranks("kv_consumer", 17, swa_pages=9, slots=7)
    prefill.fill(3)
    at = first_token // 4
    states_d, states_p = [pages(8, 4), [np.array([6])]], [pages(1, 5), [np.array([2])]]
    of_p, of_d = begin(prefill, decode, first_token=first_token, targets=D_PAGES[at:], states=states_d)
    prefill.ledger.send(of_p, pages(P_PAGES[at]), None, 2)
    prefill.ledger.send(of_p, pages(*P_PAGES[at + 1 :]), states_p, 2)
    assert ended(decode, of_d) == SUCCESS, of_d.reason
    assert same(prefill, decode, P_PAGES[at:], D_PAGES[at:])
    for a, b in zip(prefill.swa, decode.swa, strict=True):
        assert (a[[1, 5]] == b[[8, 4]]).all()
        assert not b[[0, 1, 2, 3, 5, 6, 7, 9]].any()
    for a, b in zip(prefill.slots, decode.slots, strict=True):
        assert (a[2] == b[6]).all()


@pytest.mark.parametrize(("of_p", "of_d"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("heads", [2, None])
def test_ranks_of_another_number_exchange_their_heads(ranks, of_p, of_d, heads):
    def node(role, count, num_pages):
        more = {"size": count, "heads": heads, "engine_id": f"the {role}"}
        made = [ranks(role, num_pages, rank=rank, **more) for rank in range(count)]
        every = [one.address for one in made]
        for one in made:
            one.know_ranks(every)
        return made

    prefill, decode = node("kv_producer", of_p, 12), node("kv_consumer", of_d, 17)
    for one in prefill:
        one.fill(4)
    if heads is None:
        for pool, first in zip(prefill[-1].kv, prefill[0].kv, strict=True):
            pool.copy_(first)
    p_rooms = [one.ledger.open_prefill(3) for one in prefill]
    d_rooms = [one.room(3, prefill[0]) for one in decode]
    for one, room in zip(decode, d_rooms, strict=True):
        one.ledger.poll_decode(room)
        one.ledger.load(room, pages(*D_PAGES), None, 4, 0)
    for one, room in zip(prefill, p_rooms, strict=True):
        asked(one, room)
        room.num_pages = 4
        one.ledger.send(room, pages(*P_PAGES[:2]), None, 2)
        one.ledger.send(room, pages(*P_PAGES[2:]), None, 2)
    for one, room in zip(decode, d_rooms, strict=True):
        assert ended(one, room) == SUCCESS, room.reason
    for one, room in zip(prefill, p_rooms, strict=True):
        assert ended(one, room) == SUCCESS, room.reason

    def whole(node, layer, ids):
        parts = [one.kv[layer][list(ids)] for one in (node if heads else node[:1])]
        return np.concatenate([part.numpy() for part in parts], axis=-1)

    for layer in range(len(prefill[0].kv)):
        expected = whole(prefill, layer, P_PAGES)
        assert (whole(decode, layer, D_PAGES) == expected).all()
        if heads is None:
            assert all((one.kv[layer][list(D_PAGES)].numpy() == expected).all() for one in decode)


def test_a_fetch_counts_more_than_a_release_of_another_rank(ranks):
    prefill = ranks("kv_producer", 12)
    room = prefill.ledger.open_prefill(77)
    for first_token in (-1, 8, -1):
        prefill.worker.transfer._reports.add(Results(wanted=((room.handle, first_token),)))
    assert prefill.ledger.poll_prefill(room) == WAITING_FOR_INPUT
    assert room.first_token == 8
