"""KV hints: actions (pin, release, prefetch, demote) that a request asks for, on a session's KV or its own.

Hints come in the envelope of vLLM's ``kv_hints``. No hint raises: an invalid or impossible action gets an
outcome that states so. The request runs all the same, unless it is a notice: a prefetch of its own prompt,
which is cut to the tokens whose KV is found, so that nothing else is computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, product
from typing import Annotated, Any, Literal

import msgspec

from kvconnect.offload.index.session_pins import Pin
from kvconnect.offload.index.tier_index import ContentState
from kvconnect.offload.scheduler.hit_requirements import HitGroup
from kvconnect.offload.scheduler.host import NEVER, Host
from kvconnect.offload.scheduler.prefix_lookup import PrefixLookup
from kvconnect.offload.tier import DISK, HOST
from kvconnect.transfer.params import HINTS_KEY, transfer_params
from kvconnect.transfer.stack import RequestView

MOST_TTL_S = 3600.0
MOST_NOTICES = 64
"""The most notices at once: further ones are answered, and bring nothing."""
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_Version = Annotated[str, msgspec.Meta(pattern=r"^1(\.[0-9]{1,9})*$")]
Outcome = dict[str, Any]


class _Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of an action: tenant and session, a pin's lifetime in seconds, and a target tier.

    ``of``: whether a prefetch is of what the session pinned, or of the request's own prompt.
    """

    tenant: _Text
    session_id: Annotated[_Text, msgspec.Meta(min_length=1)]
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0
    to: Literal["", "device", "host", "disk"] = ""
    of: Literal["session", "prompt"] = "session"

    @property
    def session(self) -> tuple[str, str]:
        return self.tenant, self.session_id


_NONE = _Payload("", "")
_NO_SESSION = "prompt"
"""Stands for the session of a notice that names none: only pins need one."""


class _Action(msgspec.Struct, frozen=True):
    action_id: _Text
    action_type: _Text
    action_version: _Version
    payload: dict[str, Any]


class _Envelope(msgspec.Struct, frozen=True):
    protocol_version: _Version
    message_id: _Text
    actions: Annotated[list[_Action], msgspec.Meta(max_length=16)]


@dataclass(eq=False)
class _Ask:
    """An action that a request asks for; it is done once it has an ``answer``."""

    kind: str
    action_id: str
    payload: _Payload = _NONE
    answer: Outcome = field(default_factory=dict)


@dataclass(eq=False)
class _Turn:
    """The actions of one request. ``pin`` holds the request's own prompt and answer."""

    view: RequestView
    answer: Outcome
    asks: list[_Ask] = field(default_factory=list)
    pin: Pin | None = None


@dataclass(eq=False)
class Notice:
    """A request that only announces its prompt, of ``num_tokens``, and brings ``most_tokens`` of it at most.

    ``found_tokens``: those in the device's own cache, and those that are loaded, when it was admitted.
    """

    ask: _Ask
    num_tokens: int
    most_tokens: int = 0
    found_tokens: int = 0

    @property
    def is_to_host(self) -> bool:
        """What lower tiers have goes no further than to host memory."""
        return self.ask.payload.to == HOST


class Sessions:
    """Carries out the actions of all requests on the pins of their sessions."""

    def __init__(self, host: Host, lookup: PrefixLookup) -> None:
        self._host, self._lookup, self._config, self._pins = host, lookup, host.config, host.pins
        self._groups = [group.group for group in host.requirements.groups]
        # The group by whose names prompts are compared, and by whose blocks tokens are counted.
        self._first = (host.requirements.whole or host.requirements.partial)[0]
        self._turns: dict[str, _Turn] = {}
        self.notices: dict[str, Notice] = {}
        """The requests that are notices, until they end."""
        self._counted: Counter[tuple[str, str]] = Counter()
        self._actions: Mapping[str, Callable[[_Turn, _Ask, int, float], Outcome]] = {
            "pin": self._pin,
            "release": self._release,
            "prefetch": self._prefetch,
            "demote": self._demote,
        }
        self._pinned = self._pins.pinned_bytes()

    def arrive(self, view: RequestView, *, reads: bool = True) -> None:
        """A request has arrived: read its hints, if any, and begin its prefetches of sessions.

        ``reads``: it may use contents of the tiers.
        """
        params = transfer_params(view)
        given = getattr(view, HINTS_KEY, None) or params.get(HINTS_KEY)
        if given is None:
            return
        try:
            envelope = msgspec.convert(given, _Envelope, from_attributes=True)
        except ValueError as error:
            self._counted["unknown", "rejected"] += 1
            self._turns[view.request_id] = _Turn(view, {"error": f"{HINTS_KEY} cannot be used: {error}"})
            return
        self._turns[view.request_id] = turn = _Turn(view, {"message_id": envelope.message_id})
        key = self._config.tenant_key
        tenant = params.get(key) if key else getattr(view, "cache_salt", None)
        names = {"session_id": getattr(view, "session_id", None) or params.get("session_id")}
        may_announce = reads and not (params.get("do_remote_prefill") or params.get("do_remote_decode"))
        for action in envelope.actions:
            turn.asks.append(ask := _Ask(action.action_type, action.action_id))
            of_prompt = ask.kind == "prefetch" and action.payload.get("of") == "prompt"
            is_notice = of_prompt and may_announce
            try:
                if ask.kind not in self._actions:
                    raise ValueError(f"accepted: {', '.join(self._actions)}")
                own = {"session_id": _NO_SESSION} if of_prompt and names["session_id"] is None else names
                ask.payload = msgspec.convert({**own, **action.payload, "tenant": tenant or ""}, _Payload)
                if of_prompt and not may_announce:
                    raise ValueError("accepted: of a prompt that may be loaded, without do_remote_*")
                if is_notice:
                    self._announce(view, ask)
                elif ask.kind == "prefetch":
                    ask.answer = self._prefetch(turn, ask, 0, 0.0)
            except ValueError as error:
                ask.answer = _rejected(str(error))
                if is_notice:
                    self.notices.setdefault(view.request_id, Notice(ask, view.num_tokens))

    def _announce(self, view: RequestView, ask: _Ask) -> None:
        """Begin a notice, within its tenant's quota, or answer why it brings nothing."""
        tenant = ask.payload.tenant
        if view.request_id in self.notices:
            ask.answer = _rejected("accepted: one prefetch of a prompt")
            return
        self.notices[view.request_id] = notice = Notice(ask, view.num_tokens)
        quota = self._host.requirements.most_tokens(self._pins.quota())
        brought = (one.most_tokens for one in self.notices.values() if one.ask.payload.tenant == tenant)
        if ask.payload.to == DISK:
            ask.answer = _rejected("accepted: to host or device")
        elif len(self.notices) > MOST_NOTICES:
            ask.answer = _rejected(
                f"{MOST_NOTICES} notices are being carried out; accepted: once one has ended"
            )
        elif (room := quota - sum(brought)) <= 0:
            ask.answer = _rejected(f"notices of this tenant bring {quota} tokens, its quota")
        else:
            notice.most_tokens = min(view.num_tokens, room)

    def begin(self, view: RequestView, *, is_kept: bool) -> Pin | None:
        """The prompt of a request is known: returns the pin that holds its contents from now on, if any."""
        if (turn := self._turns.get(view.request_id)) is None:
            return None
        for ask in turn.asks:
            if ask.kind == "pin" and not ask.answer:
                if turn.pin is not None or not is_kept or not self._config.pin_quota:
                    ask.answer = _rejected("accepted: one pin of a request that is kept, with a pin_quota")
                elif not self._pins.admits(*ask.payload.session):
                    ask.answer = _rejected("too many sessions have pins; accepted: once some have ended")
                else:
                    turn.pin = self._pins.begin(
                        *ask.payload.session, self._names(turn, self._first, 0, NEVER)
                    )
        return turn.pin

    def finished(self, request_id: str, num_tokens: int, now: float) -> Outcome | None:
        """A request ended with ``num_tokens`` tokens of KV; returns the outcomes of its hints, if any."""
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return None
        if (notice := self.notices.pop(request_id, None)) is not None:
            # What was brought counts as the request's own, although its prompt was cut.
            num_tokens = max(num_tokens, notice.found_tokens)
            notice.ask.answer = notice.ask.answer or self._brought(notice)
        for ask in turn.asks:
            ask.answer = ask.answer or self._actions[ask.kind](turn, ask, num_tokens, now)
            kind = ask.kind if ask.kind in self._actions else "unknown"
            self._counted[kind, ask.answer["outcome"]] += 1
        actions = [{"action_id": ask.action_id, "action_type": ask.kind, **ask.answer} for ask in turn.asks]
        return {**turn.answer, "actions": actions}

    def orders(self, now: float) -> dict[str, Any]:
        """A step begins: release expired pins; returns fields of ``OffloadOrders``."""
        self._pins.expire(now)
        changes = tuple((*content, is_pinned) for content, is_pinned in self._pins.disk_changes.items())
        counted = tuple((*key, times) for key, times in self._counted.items())
        self._pins.disk_changes.clear()
        self._counted.clear()
        before, self._pinned = self._pinned, self._pins.pinned_bytes()
        pinned = self._pinned if self._pinned != before else ()
        return {"disk_pins": changes, "actions": counted, "pinned": pinned}

    def _names(self, turn: _Turn, group: HitGroup, first: int, end: int) -> list[bytes]:
        return self._host.names(turn.view, group, (range(first, end),))

    def _pin(self, turn: _Turn, ask: _Ask, num_tokens: int, now: float) -> Outcome:
        """Pin the contents for a hit of the whole request, or of the part in host memory and the quota."""
        pin, requirements = turn.pin, self._host.requirements
        if pin is None or pin not in self._pins.of(*ask.payload.session):
            return _EXPIRED

        def known(group: HitGroup, first: int, end: int) -> list[bool]:
            names, place = self._names(turn, group, first, end), (HOST, group.group)
            if not group.is_whole:
                return self._host.index.has(group.group, names)
            self._pins.add(pin, place, names)
            return [name in pin.held[place] for name in names]

        length, _ = requirements.hit(0, num_tokens, known)
        full, ttl_s = requirements.last_boundary(num_tokens), min(ask.payload.ttl_s, MOST_TTL_S)
        reason = f"of {full} tokens the quota or host memory has room for {length}, at most {MOST_TTL_S:g} s"
        if length < max(1, pin.num_tokens) or not self._keep(turn, pin, length):
            # The request ended early, or a window or state that the hit needs is beyond the quota. The pin
            # keeps the prefix from before the request, until its former deadline.
            self._keep(turn, pin, pin.num_tokens)
            self._pins.end(pin, pin.until)
            return _rejected(reason)
        names = self._names(turn, self._first, 0, length // self._first.block_tokens)
        pin.num_tokens, pin.end = length, (len(names), names[-1])
        self._pins.end(pin, now + ttl_s)
        is_whole = full == length and ttl_s == ask.payload.ttl_s
        return {**_done(is_whole, HOST, length, reason), "ttl_s": ttl_s}

    def _keep(self, turn: _Turn, pin: Pin, num_tokens: int) -> bool:
        """Pin in host memory the contents for a hit of ``num_tokens``, and unpin others; whether all fit."""
        is_whole, requirements = True, self._host.requirements
        for group in (*requirements.partial, *requirements.whole):
            place, names = (HOST, group.group), self._host.names(turn.view, group, group.needed(num_tokens))
            wanted = frozenset(names)
            self._pins.let_go(pin, place, [name for name in pin.held.get(place, ()) if name not in wanted])
            is_whole &= self._pins.add(pin, place, names) == len(names)
        return is_whole

    def _release(self, turn: _Turn, ask: _Ask, num_tokens: int, now: float) -> Outcome:
        """Release the session's pins, but keep this request's contents if a later action pins them."""
        later = turn.asks[turn.asks.index(ask) + 1 :]
        own = turn.pin if any(one.kind == "pin" and not one.answer for one in later) else None
        pins = [pin for pin in self._pins.of(*ask.payload.session) if pin is not own or pin.num_tokens]
        num_tokens = max((pin.num_tokens for pin in pins), default=0)
        for pin in pins:
            if pin is own:
                self._pins.begin_anew(pin)
            else:
                self._pins.release(pin)
        return _done(True, HOST, num_tokens) if pins else _EXPIRED

    def _demote(self, turn: _Turn, ask: _Ask, num_tokens: int, now: float) -> Outcome:
        """Move pins from host memory to disk, for contents that are on disk or on their way there."""
        if ask.payload.to not in ("", DISK) or not self._config.disk_path:
            return _rejected("it is in host memory in any case; accepted: to disk, where there is one")
        index, is_whole = self._host.index, True
        for pin, group in product(pins := self._pins.of(*ask.payload.session), self._groups):
            names = list(pin.held.get((HOST, group), ()))
            written = set(compress(names, self._host.lower.has(DISK, group, names)))
            is_pending = [state is ContentState.PENDING for state in index.states(group, names)]
            there = written | self._host.jobs.being_kept(group) | set(compress(names, is_pending))
            self._pins.add(pin, (DISK, group), [name for name in names if name in there])
            moved = [name for name in names if name in pin.held.get((DISK, group), ())]
            self._pins.let_go(pin, (HOST, group), moved)
            index.drop_unused(group, [name for name in moved if name in written])
            is_whole &= len(moved) == len(names)
        return self._moved(pins, DISK, is_whole, "the rest is not on disk, or beyond the quota: it stays")

    def _prefetch(self, turn: _Turn, ask: _Ask, num_tokens: int, now: float) -> Outcome:
        """Fetch contents pinned on disk to host memory, and pin them there too."""
        if ask.payload.to == DISK:
            return _rejected("accepted: to host, and device as far as that")
        is_whole, reason = ask.payload.to != "device", "the device gets it with the session's next request"
        for pin, group in product(pins := self._pins.of(*ask.payload.session), self._groups):
            place, names = (HOST, group), list(pin.held.get((DISK, group), ()))
            # Pin contents in host memory first, so that the fetch does not evict them. Fetch within the
            # quota, so that contents of others are not evicted for a pin that is refused.
            count = self._pins.add(pin, place, names) + self._pins.room(pin, place)
            self._lookup.fetch(group, DISK, names[:count])
            if self._pins.add(pin, place, names) < len(names):
                is_whole, reason = False, "host memory, or the quota, has no more room"
        return self._moved(pins, HOST, is_whole, reason)

    def _brought(self, notice: Notice) -> Outcome:
        """The outcome of a notice: the tokens of its prompt that are there now."""
        found, full = notice.found_tokens, self._host.requirements.last_boundary(notice.num_tokens - 1)
        reason = f"of {full} tokens {found} are kept here or at its sources, within the quota"
        return _done(found >= full > 0, HOST if notice.is_to_host else "device", found, reason)

    def _moved(self, pins: Sequence[Pin], tier: str, is_whole: bool, reason: str) -> Outcome:
        """The outcome of moved pins: the tokens of the longest that are in a tier or on their way there."""
        counts = [len(pin.held.get((tier, self._first.group), ())) for pin in pins]
        return _done(is_whole, tier, max(counts) * self._first.block_tokens, reason) if pins else _EXPIRED


def _done(is_whole: bool, tier: str, num_tokens: int, reason: str = "") -> Outcome:
    if not is_whole and not num_tokens:
        return _rejected(reason)
    done = {"outcome": "accepted" if is_whole else "clipped", "tier": tier, "num_tokens": num_tokens}
    return done if is_whole else {**done, "reason": reason}


def _rejected(reason: str) -> Outcome:
    return {"outcome": "rejected", "reason": reason}


_EXPIRED: Outcome = {"outcome": "expired", "reason": "the session has no pin, or none any more"}
