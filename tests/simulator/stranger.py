"""A node that has a key and keeps to no rule: what it says, and what it writes into the slots of others.

The halves behind it are the real ones, so that what it does comes where it can hurt: to what peers asked of
it, and to what they asked of others at the same time. It says messages that are late, repeated, left out,
changed, or made up; it overhears what others say, and guesses the numbers that come next.
"""

from __future__ import annotations

import functools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvconnect.engine.base import Batch
from kvconnect.engine.lanes import Transport
from kvconnect.outcome import Cause
from kvconnect.peer.messages import (
    Accepted,
    Alive,
    Bad,
    Cancel,
    CreditGrant,
    CreditRequest,
    Fetch,
    Hello,
    Landed,
    Message,
    PrefixFound,
    Release,
    Renew,
    Renewed,
    StillAlive,
    Welcome,
    Written,
    encode,
)
from tests.simulator.memory import noise
from tests.simulator.network import SimChannel, read_frame, tag_of
from tests.simulator.scenario import FAULTS_S
from tests.simulator.world import START_S, World

if TYPE_CHECKING:
    from tests.simulator.network import Network
    from tests.simulator.worker import SimWorker

Said = list[tuple[float, bytes]]
"""Frames, and after how many seconds each is sent."""

_OF_USE = {
    False: (b"fetch", b"granted", b"let_go", b"renew", b"find"),
    True: (b"landed", b"written", b"accepted", b"wanted", b"renewed", b"found"),
}
"""What is worth to be remembered of what others say, by whether a decode node hears it."""
_REMEMBERED, _LENT = 20, 4
_PASSED, _CHANGED, _DELAYED = 0.85, 0.09, 0.03
_ADDED, _ECHOED, _NAGGED = 0.4, 0.7, 0.1
_NAGS, _NAGS_EVERY_S = 30, 1.5
_WAITS_S = (0.0, 0.0, 0.002, 0.3, 3.0)
_TRUE = ("version", "introduction")
"""Fields without which nobody would listen any more."""
_NUMBERED = (Fetch, CreditGrant, Landed, Accepted, Written, CreditRequest)
"""What is said of one fetch."""


class Liar:
    """One worker's lies.

    Args:
        handles: guesses of what others hold. What is overheard of that is better.
    """

    def __init__(self, rng: random.Random, handles: tuple[str, ...]) -> None:
        self._rng = rng
        self._handles = deque(handles, maxlen=_REMEMBERED)
        self._generations: deque[int] = deque(maxlen=_LENT)
        self._overheard: dict[bool, deque[bytes]] = {
            to_decode: deque(maxlen=_REMEMBERED) for to_decode in (False, True)
        }

    def overhear(self, data: bytes, *, to_decode: bool) -> Said:
        """Somebody else says something. What to say to the same one, if it listens to us."""
        tag = tag_of(data)
        if not any(name in tag for name in _OF_USE[to_decode]):
            return []
        self._overheard[to_decode].append(data)
        message = read_frame(data, to_decode=to_decode)
        if isinstance(message, Fetch | Release) and message.handle not in self._handles:
            self._handles.append(message.handle)
        if isinstance(message, Fetch | CreditGrant):
            self._generations.extend(grant.generation for grant in message.grants)
        rng = self._rng
        if not to_decode or rng.random() >= _ECHOED:
            return []
        if rng.random() < 0.5:
            data = self._lie(message, to_decode)
        return [(rng.choice(_WAITS_S), data)]

    def instead_of(self, data: bytes, *, to_decode: bool) -> Said:
        """What is said in place of a frame; ``to_decode``: a peer that fetches from us hears it."""
        rng = self._rng
        frames: Said = []
        message, kind = read_frame(data, to_decode=to_decode), rng.random()
        if isinstance(message, PrefixFound):
            # One in two: it is asked but once or twice.
            kind = _PASSED + kind * 2 * _CHANGED
        if kind < _PASSED or isinstance(message, Hello | Welcome):
            frames.append((0.0, data))
        elif kind < _PASSED + _CHANGED:
            frames.append((0.0, encode(self._changed(message))))
        elif kind < _PASSED + _CHANGED + _DELAYED:
            frames.append((rng.choice(_WAITS_S), data))
        known = [data, *self._overheard[to_decode]]
        while rng.random() < _ADDED:
            other = read_frame(rng.choice(known), to_decode=to_decode)
            frames.append((rng.choice(_WAITS_S), self._lie(other, to_decode)))
        if to_decode and rng.random() < _NAGGED:
            frames += self._nagged(message)
        return frames

    def _nagged(self, message: Message) -> Said:
        """Say for a long time that what a peer asked for is not quiescent yet."""
        if not isinstance(message, Landed | Accepted | Written):
            return []
        frame = encode(Written(message.transfer_id, False, False, 0, 0, 0.0, Cause.PROTOCOL("a lie")))
        return [(_NAGS_EVERY_S * number, frame) for number in range(_NAGS)]

    def _lie(self, message: Message, to_decode: bool) -> bytes:
        rng = self._rng
        kind = rng.random()
        if kind < 0.03:
            return rng.randbytes(rng.randrange(40))
        if kind < 0.4 and isinstance(message, _NUMBERED):
            message = self._invented(message, to_decode)
        if kind < 0.9:
            message = self._changed(message)
        return encode(message)

    def _near(self, number: int) -> int:
        return max(0, number + self._rng.choice((-7, -2, -1, -1, 0, 0, 1, 1, 2, 7)))

    def _time(self) -> float:
        return self._rng.choice((0.0, -1.0, 1e-3, 1e9, math.nan, math.inf))

    def _invented(self, message: Message, to_decode: bool) -> Message:
        """Another message about the same fetch, or one beside it."""
        rng = self._rng
        number = self._near(message.transfer_id)  # type: ignore[union-attr]
        if not to_decode:
            return rng.choice(
                (Cancel(number), Release(rng.choice(self._handles), 1), Renew(tuple(self._handles)), Alive())
            )
        epoch = getattr(message, "epoch", 0)
        generation = getattr(message, "generation", 1)
        spared = tuple(self._near(generation) or 1 for _ in range(4))
        return rng.choice(
            (
                Written(number, True, True, 0, 0, 0.0, None, epoch=epoch),
                Written(
                    number,
                    False,
                    rng.random() < 0.5,
                    0,
                    0,
                    0.0,
                    Cause.PROTOCOL("a lie"),
                    again=rng.random() < 0.5,
                ),
                Accepted(number, self._near(epoch)),
                CreditRequest(number, rng.randrange(9), spared),
                Renewed(over=((rng.choice(self._handles), Cause.PROTOCOL("a lie")),)),
                Renewed(epochs=tuple((handle, self._near(epoch)) for handle in self._handles)),
                StillAlive(),
                Transport("tcp", "a lie", bytes_per_s=1.0),
                Bad("a lie"),
            )
        )

    def _changed(self, said: Any) -> Any:
        """A message, or what is in one, with some of its fields as they should not be."""
        rng = self._rng
        names = [name for name in said.__struct_fields__ if name not in _TRUE]
        some = rng.sample(names, min(len(names), rng.randint(1, 3)))
        if isinstance(said, Landed) and rng.random() < 0.5:
            # All else is right: then nothing but the number says that it is another slot.
            some = ["generation"]
        wrong = {name: self._wrong(name, getattr(said, name)) for name in some}
        return msgspec.structs.replace(said, **wrong)

    def _wrong(self, name: str, value: Any) -> Any:
        """Something else of the same type."""
        rng = self._rng
        match value:
            case bool():
                return not value
            case int() if name == "generation":
                return rng.choice((*self._generations, max(1, self._near(value))))
            case int():
                return rng.choice((self._near(value), self._near(value), 8, 1 << 30))
            case float():
                return self._time()
            case str() if name == "handle":
                return rng.choice(self._handles)
            case tuple() if name == "handles":
                return tuple(self._handles)
            case tuple() if name == "epochs":
                return tuple((handle, self._near(epoch)) for handle, epoch in value)
            case tuple():
                return rng.choice((value * 2, value[::-1]))
            case msgspec.Struct():
                return self._changed(value)
        return value


_STRAY = 0.3
_STRAY_WAITS_S = (0.0, 0.0, 0.0005, 0.003, 0.05, 1.0)


def is_lying(world: World) -> bool:
    """It ends with all that goes wrong."""
    return world.now < START_S + FAULTS_S


class LyingChannel(SimChannel):
    """The channel of a stranger's worker: see ``Liar``."""

    def __init__(self, network: Network, host: str, port: int, wake: Callable[[], None], liar: Liar) -> None:
        super().__init__(network, host, port, wake)
        self._liar = liar
        network.listeners.append(self._overhear)

    def send(self, link: str, data: bytes) -> bool:
        world = self._network.world
        if not is_lying(world):
            return super().send(link, data)
        for after_s, frame in self._liar.instead_of(data, to_decode=link.startswith("in:")):
            if after_s:
                world.after(after_s, functools.partial(self._say, link, frame))
            else:
                super().send(link, frame)
        return True

    def _say(self, link: str, frame: bytes) -> None:
        if not self.closed and not self.stopped:
            super().send(link, frame)

    def _overhear(self, who: SimChannel, link: str, data: bytes) -> None:
        """Somebody says something to a decode node that may listen to us as well, or to a prefill node."""
        network = self._network
        if self.closed or who.host == self.host or not is_lying(network.world):
            return
        opener = network.opener_of(link)
        lies = self._liar.overhear(data, to_decode=opener is not None)
        for far in network.links_between(opener, self) if lies and opener is not None else ():
            for after_s, frame in lies:
                network.world.after(after_s, functools.partial(self._say, far, frame))


class Scribbler:
    """Writes into landing slots, soon after somebody else did: what it likes, or what another slot has."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.written = 0

    def saw(self, batch: Batch, target: SimWorker) -> None:
        """Something was written to a worker's memory."""
        rng, pool = self._rng, target.landing
        if not pool.slots or not is_lying(self._world) or rng.random() >= _STRAY:
            return
        touched = [slot.address for slot in pool.slots if slot.address == batch.target]
        if touched:
            address = rng.choice(touched)
            self._world.after(rng.choice(_STRAY_WAITS_S), lambda: self._scribble(target, address))

    def _scribble(self, target: SimWorker, address: int) -> None:
        rng, memory = self._rng, target.memory
        length = target.slot_bytes
        content = noise(rng.randrange(1 << 16), length)
        if rng.random() < 0.3:
            content = memory.read(rng.choice(memory.landing), length)
        some = rng.randint(1, length)
        self.written += 1
        self._world.note("stranger", "writes", target.who, memory.landing.index(address), some)
        memory.write(address, content[:some])
