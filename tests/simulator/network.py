"""A simulated network of ZeroMQ's connections on the virtual clock, and the channels that workers use.

Within a connection frames arrive in order, each once. A connection that breaks loses what was under way; it
is made anew under another name at its far end, and what was said meanwhile is sent then. Of two connections
nothing is in order. What is said of landing slots is written down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvconnect.errors import PeerError
from kvconnect.peer.channel import Arrival, Frame, LinkLost
from kvconnect.peer.loss import PeerLoss
from kvconnect.peer.messages import Bad, CreditGrant, Fetch, Landed, Message, Side, decode
from tests.simulator.world import World

_LARGEST_BYTES = 1 << 30
_TAG_BYTES = 10


def tag_of(data: bytes) -> bytes:
    """Where a frame says what it is: most need not be read for more."""
    return data[:_TAG_BYTES]


def read_frame(data: bytes, *, to_decode: bool) -> Message:
    """The message of a frame; ``Bad`` if it is none that this side of a conversation is sent."""
    try:
        return decode(Side.DECODE if to_decode else Side.PREFILL, data, _LARGEST_BYTES)
    except PeerError as error:
        return Bad(str(error))


Grant = tuple[str, int, int]
"""The connection, the number of the fetch, and the generation."""


class Grants:
    """The landing slots of one worker. ``granted`` is told of the address of each that is."""

    def __init__(self) -> None:
        self.granted: Callable[[int], None] = lambda address: None
        self._granted: dict[int, Grant] = {}
        self._landed: set[Grant] = set()

    def said(self, link: str, data: bytes) -> None:
        """The worker says something to a peer that it fetches from."""
        tag = tag_of(data)
        if b"fetch" in tag or b"granted" in tag:
            message = read_frame(data, to_decode=False)
            if isinstance(message, Fetch | CreditGrant):
                for grant in message.grants:
                    self._granted[grant.address] = (link, message.transfer_id, grant.generation)
                    self.granted(grant.address)

    def heard(self, link: str, data: bytes) -> None:
        """Such a peer says something."""
        if b"landed" in tag_of(data):
            message = read_frame(data, to_decode=True)
            if isinstance(message, Landed):
                self._landed.add((link, message.transfer_id, message.generation))

    def use(self, address: int) -> bool:
        """The worker takes what lies in a slot. False: whom it granted that has not said that it is there.

        What was said is good for one use.
        """
        grant = self._granted.pop(address, None)
        if grant is None or grant not in self._landed:
            return False
        self._landed.discard(grant)
        return True


_MOST_ARRIVALS = 64


class SimChannel:
    """See ``Channel``. ``stopped``: the process behind it is, and reads nothing.

    ``grants`` is what was said over it about landing slots.
    """

    def __init__(self, network: Network, host: str, port: int, wake: Callable[[], None]) -> None:
        self.host = host
        self.opened: dict[str, Connection] = {}
        self.closed = False
        self.stopped = False
        self._network = network
        self._port = port
        self._wake = wake
        self._inbox: deque[Arrival] = deque()
        self._held: deque[Arrival] = deque()
        self.grants = Grants()

    @property
    def port(self) -> int:
        return self._port

    def connect(self, link: str, host: str, port: int) -> None:
        self.drop(link)
        self._network.open(link, self, port)

    def send(self, link: str, data: bytes) -> bool:
        self._network.world.note(f"{self.host}:{self._port}", "says", link, data)
        connection = self.opened.get(link)
        for listener in self._network.listeners:
            listener(self, link, data)
        if connection is None:
            return self._network.answer(link, data)
        self.grants.said(link, data)
        connection.said.append(data)
        if connection.up:
            self._network.say(connection, data, connection.there)
        else:
            connection.waiting.append(data)
        return True

    def drop(self, link: str) -> None:
        connection = self.opened.get(link)
        if connection is not None:
            self._network.close(connection)

    def receive(self) -> list[Arrival]:
        count = min(len(self._inbox), _MOST_ARRIVALS)
        arrived = [self._inbox.popleft() for _ in range(count)]
        taken = [item for item in arrived if item.link.startswith("in:") or item.link in self.opened]
        for item in taken:
            if isinstance(item, Frame) and item.link in self.opened:
                self.grants.heard(item.link, item.data)
        return taken

    def take(self, item: Arrival) -> None:
        """Called by the network."""
        # Of one connection nothing overtakes what came before it, the news that it was lost included.
        is_behind = any(held.link == item.link for held in self._held)
        (self._held if is_behind else self._inbox).append(item)
        self._wake()

    def go_on(self) -> None:
        """The process runs again: its I/O thread takes a moment to hand over what came meanwhile."""
        self.stopped = False
        world = self._network.world
        self._held.extend(self._inbox)
        self._inbox.clear()

        def hand_over() -> None:
            self._inbox.extendleft(reversed(self._held))
            self._held.clear()
            self._wake()

        world.after(0.01 * world.random.random(), hand_over)

    def wait(self, timeout_s: float) -> None:
        """Returns at once: time is the simulation's."""

    def wake(self) -> None:
        self._wake()

    def close(self) -> None:
        self._network.kill(self._port)


_RECONNECT_S = 0.1
_RETRY_S = 0.5


@dataclass
class Weather:
    """How a network behaves. Delays are in seconds, the rest are shares."""

    delay_s: float = 0.001
    jitter_s: float = 0.001
    slow: float = 0.0
    slow_s: float = 0.5
    heartbeat_s: float = 4.0
    repeats: float = 0.0


@dataclass(eq=False)
class _Way:
    """One direction of a connection: ``frames`` are under way on it, of which ``awaited`` will arrive.

    The others wait for the network. Whichever arrives next is the one that was said first.
    """

    arrives: float = 0.0
    awaited: int = 0
    frames: deque[bytes] = field(default_factory=deque)


@dataclass(eq=False)
class Connection:
    """What a worker opened. ``far`` is its name at the other end, another one after each break.

    ``epoch`` counts breaks: what was sent before one never arrives after it.
    """

    link: str
    opener: SimChannel
    port: int
    target: SimChannel | None = None
    far: str = ""
    up: bool = False
    dropped: bool = False
    epoch: int = 0
    waiting: deque[bytes] = field(default_factory=deque)
    there: _Way = field(default_factory=_Way)
    back: _Way = field(default_factory=_Way)
    said: deque[bytes] = field(default_factory=lambda: deque(maxlen=3))


class Network:
    """All channels of a run, by port. Hosts are what a partition is between.

    ``listeners`` overhear every frame: who says it, over which connection, and what.
    """

    def __init__(self, world: World, weather: Weather) -> None:
        self.world = world
        self.weather = weather
        self.channels: dict[int, SimChannel] = {}
        self.connections: list[Connection] = []
        self.listeners: list[Callable[[SimChannel, str, bytes], None]] = []
        self._by_far: dict[str, Connection] = {}
        self._parted: set[frozenset[str]] = set()
        self._names = 0
        self._next_port = 1

    def channel(
        self, host: str, wake: Callable[[], None], port: int = 0, make: Callable[..., SimChannel] = SimChannel
    ) -> SimChannel:
        """A channel of a process on a host, at a port of its own or at one that is free again."""
        if not port:
            port, self._next_port = self._next_port, self._next_port + 1
        channel = self.channels[port] = make(self, host, port, wake)
        return channel

    def links_between(self, opener: SimChannel, target: SimChannel) -> list[str]:
        """The names by which one end can answer whoever opened connections to it."""
        return [
            connection.far
            for connection in self.connections
            if connection.up and connection.opener is opener and connection.target is target
        ]

    def opener_of(self, far: str) -> SimChannel | None:
        """Who opened a connection that came under this name."""
        connection = self._by_far.get(far)
        return None if connection is None else connection.opener

    # Faults

    def part(self, first: str, second: str) -> None:
        """From now on nothing gets through between two hosts; nobody is told."""
        self._parted.add(frozenset((first, second)))
        for connection in list(self.connections):
            if connection.up and self._is_parted(connection):
                self._watch(connection)

    def join(self, first: str, second: str) -> None:
        """What is sent between two hosts gets through again, and so does what waited."""
        self._parted.discard(frozenset((first, second)))
        for connection in list(self.connections):
            if connection.up and not self._is_parted(connection):
                self._unstall(connection)

    def silence(self, port: int) -> None:
        """The process behind a port is stopped: it is noticed when no heartbeat comes."""
        for connection in list(self.connections):
            if port in (connection.port, connection.opener.port) and connection.up:
                self._watch(connection)

    def cut(self, connection: Connection) -> None:
        """A connection breaks, and is made anew."""
        self._break(connection, PeerLoss.LINK_LOST)

    def kill(self, port: int) -> None:
        """The process behind a port is gone: its peers see their connections end."""
        channel = self.channels.pop(port)
        channel.closed = True
        for connection in list(self.connections):
            if connection.opener is channel:
                self._forget(connection)
            elif connection.port == port:
                self._break(
                    connection, PeerLoss.LINK_LOST if self._is_parted(connection) else PeerLoss.PROCESS_GONE
                )

    # What channels do

    def open(self, link: str, opener: SimChannel, port: int) -> None:
        connection = Connection(link, opener, port)
        opener.opened[link] = connection
        self.connections.append(connection)
        self.world.after(self._delay(), lambda: self._connect(connection, connection.epoch))

    def say(self, connection: Connection, data: bytes, way: _Way) -> None:
        """Send a frame over a connection that is up."""
        way.frames.append(data)
        if not self._is_parted(connection):
            self._await(connection, way)

    def _await(self, connection: Connection, way: _Way) -> None:
        way.arrives = max(way.arrives, self.world.now + self._delay())
        way.awaited += 1
        epoch = connection.epoch
        self.world.at(way.arrives, lambda: self._arrive(connection, epoch, way))

    def answer(self, far: str, data: bytes) -> bool:
        """Send a frame back over a connection that came. False: it is not there any more."""
        connection = self._by_far.get(far)
        if connection is None or not connection.up:
            return False
        self.say(connection, data, connection.back)
        return True

    def close(self, connection: Connection) -> None:
        """The opener has no use for it any more. What it said is still under way."""
        connection.dropped = True
        connection.opener.opened.pop(connection.link, None)
        self.connections.remove(connection)
        if connection.up:
            self.world.after(1.0, lambda: self._by_far.pop(connection.far, None))

    # What the network does

    def _delay(self) -> float:
        weather, random = self.weather, self.world.random
        delay = weather.delay_s + weather.jitter_s * random.random()
        if weather.slow and random.random() < weather.slow:
            delay += weather.slow_s * random.random()
        return delay

    def _is_parted(self, connection: Connection) -> bool:
        target = self.channels.get(connection.port)
        if target is None or not self._parted:
            return False
        return frozenset((connection.opener.host, target.host)) in self._parted

    def _connect(self, connection: Connection, epoch: int) -> None:
        if connection.dropped or connection.up or connection.epoch != epoch or connection.opener.closed:
            return
        target = self.channels.get(connection.port)
        if target is None:
            connection.opener.take(LinkLost(connection.link, PeerLoss.PROCESS_GONE))
            connection.epoch += 1
            again = connection.epoch
            self.world.after(_RETRY_S, lambda: self._connect(connection, again))
            return
        if self._is_parted(connection) or target.stopped:
            self.world.after(_RETRY_S, lambda: self._connect(connection, epoch))
            return
        self._names += 1
        connection.target = target
        connection.far = f"in:{self._names}"
        self._by_far[connection.far] = connection
        connection.up = True
        connection.there, connection.back = _Way(), _Way()
        repeated = list(connection.said) if epoch and self.world.chance(self.weather.repeats) else []
        while connection.waiting:
            self.say(connection, connection.waiting.popleft(), connection.there)
        for data in repeated:
            self.say(connection, data, connection.there)

    def _arrive(self, connection: Connection, epoch: int, way: _Way) -> None:
        if connection.epoch != epoch:
            return
        way.awaited -= 1
        if self._is_parted(connection):
            return
        data = way.frames.popleft()
        if way is connection.back:
            if not connection.dropped:
                connection.opener.take(Frame(connection.link, data))
            return
        if connection.target is not None and not connection.target.closed:
            connection.target.take(Frame(connection.far, data))

    def _unstall(self, connection: Connection) -> None:
        for way in (connection.there, connection.back):
            for _ in range(len(way.frames) - way.awaited):
                self._await(connection, way)

    def _watch(self, connection: Connection) -> None:
        """Nothing gets through: if that stays so, the heartbeat ends the connection."""
        epoch = connection.epoch

        def miss() -> None:
            target = connection.target
            stopped = connection.opener.stopped or (target is not None and target.stopped)
            if connection.epoch == epoch and connection.up and (stopped or self._is_parted(connection)):
                self._break(connection, PeerLoss.LINK_LOST)

        self.world.after(self.weather.heartbeat_s * (1 + self.world.random.random()), miss)

    def _break(self, connection: Connection, loss: PeerLoss) -> None:
        if not connection.up:
            return
        connection.up = False
        connection.epoch += 1
        self._by_far.pop(connection.far, None)
        if connection.dropped:
            return
        connection.opener.take(LinkLost(connection.link, loss))
        again = connection.epoch
        self.world.after(_RECONNECT_S, lambda: self._connect(connection, again))

    def _forget(self, connection: Connection) -> None:
        connection.up, connection.dropped = False, True
        connection.epoch += 1
        self._by_far.pop(connection.far, None)
        self.connections.remove(connection)
