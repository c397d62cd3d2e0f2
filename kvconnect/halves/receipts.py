"""The receipts of a node's requests: where each one's prompt tokens came from, until it ends.

Only requests that want a receipt have a record here: without any, no hook of the scheduler half calls this
module. One thread; the clocks are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvconnect.errors import PeerError
from kvconnect.outcome import Outcome
from kvconnect.peer.timeline_page import digest
from kvconnect.receipt import (
    COMPUTED,
    DEVICE,
    LOADED,
    MOST_BYTES,
    PEER,
    RECEIPT_KEY,
    UNSERVED,
    LoadPart,
    Receipt,
    sign,
    verify,
)
from kvconnect.transfer.orders import Results
from kvconnect.transfer.params import HANDLE_KEY, transfer_params
from kvconnect.transfer.stack import RequestView, StackTraits

VERSION = 1
_MOST_LOADS = 8
_MOST_ID = 256


@dataclass(eq=False)
class _Record:
    """A request that wants a receipt.

    ``device`` and ``loaded``: the prompt's tokens in the device's own cache, and by origin those of loads, as
    of the last admission; ``found``: the former as of the last lookup. ``is_open``: looked up, and not
    admitted since: a request is admitted again once it is loaded. ``is_set``: it has lost its blocks: how it
    was served first is known. ``load``: the one under way, ordered at ``ordered_at``; ``outcomes`` are those
    of ranks that have ended it. ``parked``: a load into host memory, under way or ended, for which the same
    holds until the request is admitted with it.
    """

    arrived_at: float
    prefill: dict[str, Any]
    prompt_tokens: int = 0
    device: int = 0
    found: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    is_open: bool = False
    is_set: bool = False
    admitted_at: float = 0.0
    load: LoadPart | None = None
    parked: LoadPart | None = None
    ordered_at: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    parts: list[LoadPart] = field(default_factory=list)
    identity: str = ""
    preemptions: int = 0


class Receipts:
    """All requests that want a receipt. ``is_for_all``: every request wants one.

    ``secret`` signs; empty where the node has no key. ``wall_clock`` in seconds. ``warn`` counts and logs a
    refusal by its reason.
    """

    def __init__(
        self,
        engine_id: str,
        address: str,
        traits: StackTraits,
        secret: bytes,
        *,
        is_for_all: bool,
        wall_clock: Callable[[], float],
        warn: Callable[..., None],
    ) -> None:
        self._engine_id, self._address = engine_id, address
        self._traits, self._secret, self.is_for_all = traits, secret, is_for_all
        self._clock, self._wall_clock, self._warn = traits.clock or wall_clock, wall_clock, warn
        self.records: dict[str, _Record] = {}

    def new_request(self, request: RequestView) -> None:
        """Begin the record of a request, if it wants a receipt."""
        given = transfer_params(request).get(RECEIPT_KEY)
        if self.is_for_all or given:
            prefill = self._of_prefill(request, given) if isinstance(given, dict) else {}
            self.records[request.request_id] = _Record(self._clock(), prefill)

    def looked_up(self, request_id: str, num_computed_tokens: int) -> None:
        """A request is about to be admitted with so many tokens in the device's own cache."""
        record = self.records.get(request_id)
        if record is not None and not record.is_set:
            record.found, record.is_open = num_computed_tokens, True

    def admitted(
        self, request: RequestView, load: LoadPart | None, by_origin: Mapping[str, int], why: str
    ) -> None:
        """A request was admitted, with this ``load``, whose tokens are ``by_origin``, or with none.

        ``why``: the cause for which KV that it names is not loaded.
        """
        record = self.records.get(request.request_id)
        if record is None:
            return
        now = self._clock()
        if load is not None:
            if load is not record.parked:
                record.ordered_at, record.outcomes = now, []
            record.load, record.parked = load, None
        if record.is_set or not record.is_open:
            return
        record.is_open, record.admitted_at = False, now
        record.prompt_tokens, record.loaded = request.num_tokens, dict(by_origin)
        record.device = record.found
        if self._traits.cached_tokens is not None:
            record.device = self._traits.cached_tokens(request)
        if load is None and why and not record.parts:
            missing = record.prompt_tokens - record.device
            self._add(record, LoadPart(origin=PEER, tokens=missing, ended=why))

    def parking(self, request_id: str, load: LoadPart) -> None:
        """The KV of a request that waits for blocks is loaded into host memory."""
        record = self.records[request_id]
        record.parked, record.ordered_at, record.outcomes = load, self._clock(), []

    def parked(self, request_id: str, num_tokens: int) -> LoadPart:
        """The load of ``num_tokens`` that were parked, perhaps for another request of the prompt."""
        record = self.records[request_id]
        parked = record.parked or LoadPart(origin=PEER, tokens=0, ended="", by="lease")
        record.parked = msgspec.structs.replace(parked, tokens=num_tokens)
        return record.parked

    def preempted(self, request_id: str) -> None:
        """A running request lost its blocks: what it computes or loads anew is no other origin."""
        if (record := self.records.get(request_id)) is not None:
            record.preemptions += 1
            record.is_set = True

    def update_results(self, results: Results) -> None:
        """Take the workers' results: loads that ended."""
        for outcome in results.outcomes:
            record = self.records.get(outcome.request_id)
            if record is None:
                continue
            if record.load is not None or record.parked is not None:
                record.outcomes.append(outcome)
            if record.load is None and record.parked is not None and outcome.reason is not None:
                parked, record.parked = record.parked, None
                self._end(record, parked, outcome.reason.cause.value)
        for request_id in results.received:
            record = self.records.get(request_id)
            if record is None or record.load is None:
                continue
            failure = results.failed.get(request_id)
            self._end(record, record.load, LOADED if failure is None else failure.cause.value)
            if failure is not None and not record.is_set:
                # The stack looks it up again, or fails it.
                record.loaded = {}

    def finished(
        self, request: RequestView, params: Mapping[str, Any] | None, *, delivered: bool
    ) -> dict[str, Any] | None:
        """The signed receipt of a request that ended, with ``params`` for D; None if it wants none."""
        record = self.records.pop(request.request_id, None)
        if record is None:
            return None
        if record.load is not None:
            self._end(record, record.load, "aborted")
            record.loaded = {}
        num_tokens = record.prompt_tokens or request.num_tokens
        is_served = delivered or request.num_tokens > num_tokens
        left = COMPUTED if is_served else UNSERVED
        tokens = Counter({DEVICE: record.device, **record.loaded})
        tokens[left] += num_tokens - tokens.total()
        handle = (params or {}).get(HANDLE_KEY)
        return sign(
            Receipt(
                request_id=request.request_id[:_MOST_ID],
                engine_id=self._engine_id,
                prompt=(self._traits.prompt_digest(request, num_tokens) or b"").hex(),
                prompt_tokens=num_tokens,
                tokens={origin: count for origin, count in tokens.items() if count},
                issued_at=int(self._wall_clock()),
                version=VERSION,
                address=self._address,
                identity=record.identity or self._traits.identity().digest,
                loads=tuple(record.parts),
                preemptions=record.preemptions,
                waited_us=max(0, round((record.admitted_at - record.arrived_at) * 1e6)),
                delivered=delivered,
                handle=digest(handle) if isinstance(handle, str) else "",
                prefill=record.prefill,
            ),
            self._secret,
        )

    def state(self) -> dict[str, int]:
        """The count of records. Zero when idle."""
        return {"receipts": len(self.records)}

    def _end(self, record: _Record, load: LoadPart, ended: str) -> None:
        """Note the end of a load, with what its ranks report."""
        us = round((self._clock() - record.ordered_at) * 1e6)
        load, record.load = msgspec.structs.replace(load, ended=ended, us=max(0, us)), None
        if record.outcomes:
            first = record.outcomes[0]
            record.identity, theirs = first.identities
            lanes = dict.fromkeys(one.lane for one in record.outcomes if one.lane)
            load = msgspec.structs.replace(
                load,
                bytes=sum(one.total_bytes for one in record.outcomes),
                digest=",".join(sorted({one.digest for one in record.outcomes if one.digest})),
                engine_id=first.engine_id[:_MOST_ID],
                lane="+".join(lanes),
                identity=theirs,
                # A source answers a lookup without which of its memories has it.
                tier="device" if all(one.on_device for one in record.outcomes) else load.tier,
            )
        self._add(record, load)

    @staticmethod
    def _add(record: _Record, part: LoadPart) -> None:
        record.parts.append(part)
        del record.parts[:-_MOST_LOADS]

    def _of_prefill(self, request: RequestView, given: dict[str, Any]) -> dict[str, Any]:
        """The receipt that came with P's handle; empty, and counted, if it was issued with another."""
        handle = transfer_params(request).get(HANDLE_KEY)
        try:
            if self._secret:
                receipt = verify(given, self._secret, MOST_BYTES // 2)
                if not isinstance(handle, str) or receipt.handle != digest(handle):
                    raise PeerError("it was issued with another handle")
                return given
        except PeerError as error:
            self._warn("receipt_refused", "a request came with a receipt that is not passed on: %s", error)
        return {}
