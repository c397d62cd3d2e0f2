"""The inspection topic: a worker's leases, loads, slots, peers and tiers, for people.

Read on the transfer thread: a page is bounded, however many leases and loads there are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from kvconnect.decode.loads import LoadRecord, RankFetchState
from kvconnect.decode.peers import Peer
from kvconnect.halves.worker_transfers import WorkerTransfers
from kvconnect.outcome import Outcome
from kvconnect.peer.inspection import MOST_PER_PAGE, MOST_TEXT, OF_REQUEST, Inspection, Row
from kvconnect.peer.timeline_page import digest
from kvconnect.prefill.leases import Lease
from kvconnect.timeline import Timeline
from kvconnect.transfer.inbound_peers import InboundPeer
from kvconnect.transfer.slots import SlotPool, SlotState

Record = TypeVar("Record")

_LATEST = 24
_MOST_RECEIPTS = 8
_MOST_LINE = 1024
_MOST_PEERS = 256


def write_inspection(
    transfers: WorkerTransfers,
    timeline: Timeline,
    counts: Mapping[str, int],
    tiers: Mapping[str, dict[str, Any]],
    argument: str,
) -> bytes:
    """A page of the answer. ``argument`` is the number of leases and loads already seen, if any.

    One that begins or ends between two pages may be missed. After ``OF_REQUEST`` the argument is a part of a
    request's id, and only matching requests are shown.
    """
    wanted = argument.removeprefix(OF_REQUEST) if argument.startswith(OF_REQUEST) else ""
    skipped, now = 0 if wanted else max(0, int(argument or 0)), timeline.clock()
    prefill, decode, local = transfers.prefill, transfers.decode, transfers.local
    held, expected = ({}, {}) if prefill is None else (prefill.leases, prefill.book.expected)
    loads, sources = ({}, ()) if decode is None else (decode.loads, decode.peers.peers.values())
    stop = skipped + MOST_PER_PAGE
    leases: Iterable[Lease] = itertools.chain(held.values(), expected.values())
    loading: Iterable[LoadRecord] = loads.values()
    if wanted:
        leases = (lease for lease in leases if wanted in _request_of(lease))
        loading = (load for load in loading if wanted in load.order.request_id)
    ended = () if decode is None else reversed(decode.outcomes)
    outcomes = (outcome for outcome in ended if wanted in outcome.request_id)
    # A copy: the thread of the hooks adds receipts meanwhile.
    issued = reversed(transfers.receipts.copy()) if wanted else ()
    receipts = (receipt for receipt in issued if wanted in receipt["request_id"])
    peers = itertools.chain(
        (_source(peer, now) for peer in sources),
        (_inbound(inbound) for _, inbound in transfers.inbound_peers),
    )
    inspection = Inspection(
        engine_id=local.introduction.engine_id,
        rank=local.introduction.rank,
        counts=dict(counts),
        leases=tuple(_lease(one, now) for one in _page(leases, skipped)),
        loads=tuple(_load(one, now) for one in _page(loading, skipped)),
        slots=(_slots("receive", local.landing), _slots("send", local.send)),
        peers=tuple(itertools.islice(peers, _MOST_PEERS)),
        tiers=dict(tiers),
        latest=tuple(_latest(timeline, now)),
        is_last=bool(wanted) or stop >= max(len(held) + len(expected), len(loads)),
        ended=tuple(map(_shortened, itertools.islice(outcomes, _LATEST))),
        receipts=tuple(itertools.islice(receipts, _MOST_RECEIPTS)),
    )
    return msgspec.msgpack.encode(inspection)


def _page(records: Iterable[Record], skipped: int) -> Iterator[Record]:
    return itertools.islice(records, skipped, skipped + MOST_PER_PAGE)


def _request_of(lease: Lease) -> str:
    return "" if lease.order is None else lease.order.request_id


def _lease(lease: Lease, now: float) -> Row:
    """A request that is held, or is still being prefilled; the latter has no times yet.

    The digest stands for the handle, as in the timeline: the handle itself would open a load.
    """
    order, revoked = lease.order, lease.revoked
    ids = lease.blocks.values() if order is None else (of.block_ids for of in order.groups)
    state = "sending" if lease.sending else "prefilling" if order is None else "held"
    return {
        "digest": digest(lease.handle),
        "request_id": _request_of(lease)[:MOST_TEXT],
        "state": state if revoked is None else revoked.text,
        "tokens": lease.num_tokens,
        "blocks": sum(map(len, ids)),
        "renewed_by": len(lease.renewers),
        "age_s": None if order is None else now - lease.held_at,
        "left_s": None if order is None or revoked else lease.expires_at - now,
    }


def _load(load: LoadRecord, now: float) -> Row:
    """A request that is being fetched, over all source ranks."""
    engine_id, host, port = load.peer
    fetches = load.fetches.values()
    landings = [fetch.landing for fetch in fetches if fetch.landing is not None]
    return {
        "digest": digest(load.order.handle),
        "request_id": load.order.request_id[:MOST_TEXT],
        "engine_id": engine_id[:MOST_TEXT],
        "address": f"{host}:{port}"[:MOST_TEXT],
        "phase": _phase(load),
        "age_s": now - load.ordered_at,
        "left_s": load.deadline - now,
        "landed_bytes": sum(one.staged[chunk].total_bytes for one in landings for chunk in one.committed),
        "total_bytes": sum(landing.total_bytes for landing in landings),
    }


def _shortened(outcome: Outcome) -> Outcome:
    reason = outcome.reason
    return msgspec.structs.replace(
        outcome,
        request_id=outcome.request_id[:MOST_TEXT],
        engine_id=outcome.engine_id[:MOST_TEXT],
        reason=None if reason is None else reason.cause(reason.text[:_MOST_LINE]),
    )


def _phase(load: LoadRecord) -> str:
    if load.error:
        return f"failed: {load.error}"[:MOST_TEXT]
    if not load.admitted:
        return "waits for its turn"
    # A load waits for its slowest rank.
    states, order = [fetch.state for fetch in load.fetches.values()], list(RankFetchState)
    return min(states, key=order.index, default=RankFetchState.MEETING).value


def _slots(direction: str, pool: SlotPool) -> Row:
    states = Counter(slot.state for slot in pool.slots)
    return {
        "direction": direction,
        "slot_bytes": pool.slot_bytes,
        "free": states[SlotState.FREE],
        "ours": states[SlotState.OURS],
        "granted": states[SlotState.THEIRS],
        "quarantined": states[SlotState.QUARANTINED],
    }


def _source(peer: Peer, now: float) -> Row:
    """A peer that KV is received from. ``refusal`` is why its breaker permits no fetch now."""
    at, kind, reason = peer.last_loss or (now, None, "")
    breaker = peer.breaker if peer.breaker.failures else peer.lanes
    more = {
        "rate": "; ".join({str(link.found): None for link in peer.links.values() if link.found})[:MOST_TEXT],
        "failures": breaker.failures,
        "refusal": str(peer.refusal(now) or "")[:MOST_TEXT],
        "retry_s": max(0.0, breaker.retry_at - now) if breaker.failures else 0.0,
        "loss": "" if kind is None else f"{kind.name.lower()}: {reason}"[:MOST_TEXT],
        "loss_age_s": now - at,
    }
    return {
        "direction": "received",
        "engine_id": peer.key[0][:MOST_TEXT],
        "ranks": tuple(sorted(rank for rank, link in peer.links.items() if link.is_ready)),
        "address": peer.address[:MOST_TEXT],
        "met": "" if not peer.is_ready else "warm_peers" if peer.is_warm else "a request named it",
        **{name: value for name, value in more.items() if value},
    }


def _inbound(inbound: InboundPeer) -> Row:
    """A peer that KV is sent to."""
    peer, path = inbound.session.peer, inbound.path
    return {
        "direction": "sent",
        "engine_id": peer.engine_id[:MOST_TEXT] if peer is not None else "",
        "ranks": () if peer is None else (peer.rank,),
        "address": inbound.host,
        "met": "it connected",
        "rate": str(path.meter.found) if path is not None and path.meter is not None else "",
    }


def _latest(timeline: Timeline, now: float) -> Iterator[Row]:
    for at, moment, handle, request_id, _, number in timeline.latest(_LATEST):
        row = {"age_s": now - at, "moment": moment, "digest": digest(handle)}
        yield row | {"request_id": request_id, "number": int(number)}
