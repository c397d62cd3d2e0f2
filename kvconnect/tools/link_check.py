"""Measures how fast KV arrives from a running peer, by the peer's calibration of the link.

Meanwhile this process acts as a decode node without a scheduler: it greets with the peer's own meaning, lends
scratch memory for the peer to write to, and asks for no KV that the peer holds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import closing

import msgspec
import torch

from kvconnect.cache.identity import Naming, Prefix
from kvconnect.engine.base import Engine, Span
from kvconnect.engine.lanes import LEAST_SHARE, Transport
from kvconnect.engine.registry import create_engine
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause, Reason
from kvconnect.pack.arena import Arena, auto_slot_bytes
from kvconnect.peer.asking import asking_channel
from kvconnect.peer.channel import Channel, LinkLost
from kvconnect.peer.description import Description
from kvconnect.peer.messages import FindPrefix, Introduction, PrefixFound, Side, Welcome
from kvconnect.peer.session import Ended, Event, Misused, Session
from kvconnect.tools.facts import Facts
from kvconnect.tools.findings import Finding, warning, warning_if

_LINK = "calibrated"
_LONGEST_S = 10.0
_NAP_S = 1e-4
_SCRATCH_BYTES = {"cuda": 512 << 20, "cpu": 64 << 20}


def check_link(facts: Facts, peer: Description, address: tuple[str, int]) -> Iterator[Finding]:
    """Whether bytes from a peer's rank 0 arrive at the rate that the link should give.

    Raises ``PeerError``, ``EngineError`` or ``LayoutError`` if nothing arrived.
    """
    theirs = peer.introduction
    if peer.role == "kv_consumer":
        yield warning("rate", "the peer only fetches: its link is not measured", "ask a node that prefills")
        return
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    slot_bytes = theirs.slot_bytes or auto_slot_bytes(device)
    arena = Arena(device, slot_bytes, 2, max(slot_bytes, _SCRATCH_BYTES[device.type]))
    found = _calibrated(facts, theirs, address, arena)
    advice = "look at the rows above, at other traffic, and at where the processes run (NUMA)"
    yield warning_if(found.share < LEAST_SHARE, "contiguous", str(found), advice)


def _calibrated(facts: Facts, theirs: Introduction, address: tuple[str, int], arena: Arena) -> Transport:
    """The result of the peer's calibration of its link to our scratch memory."""
    extra = facts.extra
    options = extra.all_engine_options
    with closing(
        create_engine(theirs.engine, host=extra.host, protocol=extra.protocol, options=options)
    ) as engine:
        engine.register([Span(arena.address, arena.length_bytes, str(arena.device))])
        ours = msgspec.structs.replace(
            theirs,
            engine_id=f"doctor-{uuid.uuid4()}",
            incarnation=uuid.uuid4().hex,
            engine_card=engine.card(),
            scratch_address=arena.scratch_address,
            scratch_bytes=arena.scratch_bytes,
            # Without shared memory the engine must carry the bytes, even where landing slots could be mapped.
            memory=None,
        )
        session = Session(Side.DECODE, ours, extra)
        with closing(asking_channel(extra, facts.keyring)) as channel:
            channel.connect(_LINK, *address)
            session.greet(time.monotonic())
            for event in _events(session, channel, engine):
                match event:
                    case Welcome():
                        # A lookup makes the peer measure the link, whether or not it finds names.
                        session.send(FindPrefix(1, Prefix(Naming("", 1), 0, ()), 1))
                    case Transport():
                        return event
                    case PrefixFound(error=Reason() as reason) if reason.cause is not Cause.NOT_HELD:
                        raise PeerError.of(reason)
                    case Ended() | Misused():
                        raise PeerError.of(event.reason)
    raise PeerError(f"it did not measure the link within {_LONGEST_S:g} s")


def _events(session: Session, channel: Channel, engine: Engine) -> Iterator[Event]:
    """The session's events, as long as a calibration may take. Raises ``PeerError`` if the link is lost."""
    deadline = time.monotonic() + _LONGEST_S
    while (now := time.monotonic()) < deadline:
        for frame in session.outgoing():
            channel.send(_LINK, frame)
        # Some engines receive only while they are polled.
        engine.poll()
        time.sleep(_NAP_S)
        for arrival in channel.receive():
            if isinstance(arrival, LinkLost):
                raise PeerError(f"the connection was lost: {arrival.reason or arrival.loss.value}")
            yield from session.receive(arrival.data, now)
