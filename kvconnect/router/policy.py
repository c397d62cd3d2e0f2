"""Policy ``prefix``: follows the KV events of the nodes for as long as they are nodes.

Nodes publish as vLLM does: batches of events in numbered messages. Missed messages are requested again where
the node has a replay address; messages lost for good leave gaps in the index.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Collection

import msgspec
import zmq
import zmq.asyncio

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError
from kvconnect.router.placing import Placing
from kvconnect.router.pool import Node, Pool
from kvconnect.router.prefix_index import Event, PrefixIndex
from kvconnect.router.router_metrics import RouterMetrics
from kvconnect.router.router_options import NAME, RouterOptions, clean_url, split_rank
from kvconnect.router.upstream import Upstream

logger = logging.getLogger("kvconnect.router")

_LOOK_S = 1.0
_LAST = (-1).to_bytes(8, "big", signed=True)
_REPLAY_MS = 5000


class Published(msgspec.Struct, frozen=True):
    """One node's addresses from the options; for a name, * stands for the host of each of its nodes."""

    kv_event_source: str = ""
    kv_event_replay_source: str = ""
    kv_source: str = ""

    def at(self, host: str) -> Published:
        """A copy with ``host`` for each *."""
        return Published(*(part.replace("*", host) for part in msgspec.structs.astuple(self)))

    def checked(self, url: str) -> Published:
        """This object. Raises ``ConfigError`` if one of its values is no valid address."""
        host = "*" if url.startswith(NAME) else "10.0.0.1"
        for endpoint in filter(None, (self.kv_event_source, self.kv_event_replay_source)):
            known = endpoint.startswith("ipc://") or (
                endpoint.startswith("tcp://") and split_address(endpoint.removeprefix("tcp://")) is not None
            )
            if not known or ("*" in endpoint) != (host == "*"):
                raise ConfigError(f"KV events are at {endpoint!r}; accepted: as tcp://{host}:5557")
        if self.kv_source and split_address(self.kv_source) is None:
            raise ConfigError(f"a node's KV source is {self.kv_source!r}; accepted: host:port")
        return self


class ReadBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]


_decoder = msgspec.msgpack.Decoder(ReadBatch)


class KVEvents:
    """Applies the events that a node publishes to an index, in an event loop, until its task is cancelled."""

    def __init__(self, index: PrefixIndex, node: str, where: Published, metrics: RouterMetrics) -> None:
        self._index, self._node, self._where, self._metrics = index, node, where, metrics
        self._next = 0
        self._is_unread = False

    async def run(self) -> None:
        """Receive and apply events. Unreadable messages are counted, and the first is logged."""
        self._context = zmq.asyncio.Context()
        try:
            socket = self._context.socket(zmq.SUB)
            # Unbounded: without a replay address a slow reader could not get dropped messages again.
            socket.set_hwm(0)
            socket.connect(self._where.kv_event_source)
            socket.subscribe(b"")
            await self._catch_up()
            while True:
                frames = await socket.recv_multipart()
                if len(frames) >= 2:
                    await self._take(int.from_bytes(frames[-2], "big"), frames[-1])
                # A backlog of events must not delay requests.
                await asyncio.sleep(0)
        finally:
            self._context.destroy(linger=0)

    async def _missed(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """The messages from the next one on that the publisher still keeps, each with its number."""
        if not self._where.kv_event_replay_source:
            return
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._where.kv_event_replay_source)
            await socket.send_multipart((b"", self._next.to_bytes(8, "big")))
            while await socket.poll(_REPLAY_MS):
                frames = await socket.recv_multipart()
                if len(frames) < 2 or frames[-2] == _LAST:
                    return
                yield int.from_bytes(frames[-2], "big"), frames[-1]

    async def _take(self, number: int, payload: bytes) -> None:
        if number < self._next:
            # The publisher has restarted.
            self._index.forget(self._node)
            self._next = 0
        if number > self._next:
            await self._catch_up(before=number)
        if number == self._next:
            self._apply(payload)

    async def _catch_up(self, before: int | None = None) -> None:
        """Apply missed messages, as far as the node still has them."""
        async with contextlib.aclosing(self._missed()) as missed:
            async for number, payload in missed:
                if before is not None and number >= before:
                    break
                self._skip_to(number)
                self._apply(payload)
        if before is not None:
            self._skip_to(before)

    def _skip_to(self, number: int) -> None:
        self._metrics.kv_events_missed.inc(max(0, number - self._next))
        self._next = max(self._next, number)

    def _apply(self, payload: bytes) -> None:
        """Apply the next message."""
        self._next += 1
        left_out = self._index.num_left_out
        try:
            for event in _decoder.decode(payload).events:
                self._index.apply(self._node, event)
        except (msgspec.MsgspecError, ArithmeticError, TypeError, ValueError) as error:
            # Invalid tokens or keys must not end the task that follows the node.
            if not self._is_unread:
                self._is_unread = True
                logger.warning(
                    "KV events of %s cannot be read, and requests are placed without them: the node has to "
                    "publish those of vLLM (further ones are only counted, in "
                    "kvconnect_router_kv_events_unread_total): %s",
                    self._node,
                    error,
                )
            self._metrics.kv_events_unread.labels(self._node).inc()
        self._metrics.blocks_left_out.inc(self._index.num_left_out - left_out)
        self._metrics.known_blocks.set(len(self._index))


class Followed:
    """Follows the KV events of all nodes; ``published`` has their addresses by URL or name.

    Raises ``ConfigError`` if no node publishes, a node is unknown, or an address is not valid.
    """

    def __init__(self, options: RouterOptions, pools: Collection[Pool], upstream: Upstream) -> None:
        self.published = _published(options)
        if not (options.admin or any(one.kv_event_source for one in self.published.values())):
            raise ConfigError(
                "policy is 'prefix' and no node publishes KV events; accepted: with --kv-event-source"
            )
        known = {url for pool in pools for url in (*pool.urls, *pool.names)}
        if unknown := sorted(self.published.keys() - known):
            raise ConfigError(f"{unknown[0]} is no node of this router; there are {', '.join(sorted(known))}")
        self.placing = Placing(PrefixIndex(), upstream)
        self._pools, self._metrics = pools, upstream.metrics
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: set[str] = set()

    async def run(self) -> None:
        """Follow new nodes and drop removed ones, until cancelled."""
        try:
            while True:
                self._look({node.url: node for pool in self._pools for node in pool.view()})
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _look(self, nodes: dict[str, Node]) -> None:
        failed = {url for url, task in self._tasks.items() if task.done()}
        for url in failed | ({*self._tasks, *self.placing.sources} - nodes.keys()):
            if url in failed:
                logger.log(
                    logging.DEBUG if url in self._failed else logging.WARNING,
                    "internal error in following the KV events of %s, which are followed anew",
                    url,
                    exc_info=self._tasks[url].exception(),
                )
                self._failed.add(url)
            if url in self._tasks:
                self._tasks.pop(url).cancel()
            self.placing.forget(url)
        for url, node in nodes.items():
            host = split_rank(url)[0].partition("//")[2].rpartition(":")[0]
            where = self.published.get(url) or self.published.get(node.name, Published()).at(host)
            if where.kv_source:
                self.placing.sources.setdefault(url, where.kv_source)
            if where.kv_event_source and url not in self._tasks:
                events = KVEvents(self.placing.index, url, where, self._metrics)
                self._tasks[url] = asyncio.create_task(events.run(), name=f"KV events of {url}")


def _published(options: RouterOptions) -> dict[str, Published]:
    """The options' ``URL=VALUE`` pairs by the node's URL. Raises ``ConfigError`` for another format."""
    found: dict[str, dict[str, str]] = {}
    for option in Published.__struct_fields__:
        for text in getattr(options, option):
            url, equals, value = text.partition("=")
            if not equals or not value:
                shown = option.replace("_", "-")
                raise ConfigError(f"--{shown} is {text!r}; accepted: URL=VALUE, with the URL of a node")
            found.setdefault(clean_url(url), {})[option] = value
    return {url: Published(**of).checked(url) for url, of in found.items()}
