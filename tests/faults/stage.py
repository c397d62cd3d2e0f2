"""A pair of nodes behind a router, whose processes may be killed and started again where they were.

Every process keeps its ports and its command line over a restart, as under a supervisor; an engine id is made
anew by each, since none is configured.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvconnect.node.children import BadAnswer, Child, ChildFailed, Samples, fetch_json, read_metrics
from kvconnect.node.pair_demo import PROTOCOLS, RESERVED_BLOCKS
from tests.nursery import Forked, Nursery, is_running
from tests.ports import free_port

DEADLINES: dict[str, float] = {
    "lease_s": 4.0,
    "peer_timeout_s": 4.0,
    "load_timeout_s": 5.0,
    "transfer_timeout_s": 3.0,
}
"""Settings under which whatever hangs is over within seconds."""

_NO_FAULT = ("peers", "inbound_peers")
"""What a worker's state counts that need not be zero at rest."""


Side = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Place:
    """Where a node runs: the address for caches, the one for HTTP, and the network namespace, if not ours."""

    host: str = "127.0.0.1"
    http_host: str = "127.0.0.1"
    namespace: str = ""


@dataclass(frozen=True)
class StageOptions:
    """What is started, and what it is asked. ``policy`` is the decode nodes' ``kv_load_failure_policy``.

    ``extra`` is laid over ``DEADLINES`` in the nodes' ``kv_connector_extra_config``; there is a node for each
    place, and a router before all nodes for each of ``flows``. ``lengths`` are those of the prompts;
    a client that waits for longer than ``deadline_s`` was not answered in time.
    """

    engine: str
    model: str = "wide"
    policy: str = "recompute"
    extra: Mapping[str, Any] = field(default_factory=dict)
    node: tuple[str, ...] = ()
    prefills: tuple[Place, ...] = (Place(),)
    decodes: tuple[Place, ...] = (Place(),)
    num_blocks: int = 1200
    router: tuple[str, ...] = ()
    flows: tuple[str, ...] = ()
    lengths: tuple[int, ...] = (1024, 777, 1024, 1000)
    max_tokens: int = 8
    deadline_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=dict)


class Actor(Child):
    """One process of the stage: it can be killed, stopped and started again."""

    def __init__(self, stage: Stage, name: str, arguments: Sequence[str], namespace: str = "") -> None:
        super().__init__(name, arguments, stage.folder / f"{name}.log")
        self.starts = 0
        self._stage = stage
        self._namespace = namespace

    def _spawn(self) -> Forked:
        assert self.log is not None
        self.starts += 1
        environment = self._stage.options.environment
        return self._stage.nursery.start(
            self.command, self.log, namespace=self._namespace, environment=environment
        )

    def kill(self) -> int:
        """SIGKILL, and wait until nothing of it is left."""
        self.send(signal.SIGCONT)
        return super().kill()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone; nothing if it is gone."""
        if self.pid and is_running(self.pid):
            os.kill(self.pid, number)

    def state(self, timeout_s: float = 10.0) -> Any:
        """What it says of itself.

        Raises:
            BadAnswer: it says nothing.
        """
        return fetch_json(self.url + "/debug/state", timeout_s=timeout_s)

    def metrics(self) -> Samples:
        """Its metrics."""
        return read_metrics(self.url)

    @property
    def rss_bytes(self) -> int:
        """The memory that it occupies."""
        pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_threads(self) -> int:
        """The threads that it runs."""
        return len(os.listdir(f"/proc/{self.pid}/task"))


class Stage:
    """The processes of one pair, or of several nodes of each role. Leaving the ``with`` block ends all.

    Raises:
        ChildFailed: one of them did not start.
    """

    def __init__(self, options: StageOptions) -> None:
        self.options = options
        self._folder = tempfile.TemporaryDirectory(prefix="kvconnect-faults-")
        self.folder = Path(self._folder.name)
        self.nursery = Nursery(
            "kvconnect.cli",
            "kvconnect.node.serving",
            "kvconnect.router.app",
            "kvconnect.halves.scheduler_half",
            "kvconnect.halves.worker_half",
        )
        self.side_ports: dict[str, int] = {}
        self.prefills = [self._node("prefill", *one) for one in enumerate(options.prefills)]
        self.decodes = [self._node("decode", *one) for one in enumerate(options.decodes)]
        self.routers: list[Actor] = []

    def __enter__(self) -> Stage:
        try:
            for node in self.nodes:
                node.start()
            for node in self.nodes:
                node.wait_ready()
            for flow in self.options.flows:
                self.add_router(flow)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def nodes(self) -> list[Actor]:
        """All nodes, without routers and references."""
        return [*self.prefills, *self.decodes]

    @property
    def prefill(self) -> Actor:
        """The first prefill node."""
        return self.prefills[0]

    @property
    def decode(self) -> Actor:
        """The first decode node."""
        return self.decodes[0]

    def first(self, side: Side) -> Actor:
        """The first node of a side."""
        return self.prefill if side == "prefill" else self.decode

    def add_router(
        self,
        flow: str = "sequential",
        prefills: Sequence[Actor] | None = None,
        decodes: Sequence[Actor] | None = None,
    ) -> Actor:
        """A router before the nodes, ready to route."""
        arguments = ["router", "--port", str(free_port()), "--flow", flow, *self.options.router]
        for option, nodes in (
            ("--prefill", self.prefills if prefills is None else prefills),
            ("--decode", self.decodes if decodes is None else decodes),
        ):
            for node in nodes:
                arguments += [option, node.url]
        router = Actor(self, f"router-{len(self.routers)}", arguments)
        self.routers.append(router)
        router.start()
        router.wait_ready()
        router.wait_answer("/ready?all", 30.0)
        return router

    def reference(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The tokens that a single node generates for these prompts; it is gone afterwards."""
        options = self.options
        arguments = ("serve", "--model", options.model, "--port", "0", *_common(options))
        single = Actor(self, "single", arguments)
        single.start()
        url = single.wait_ready()
        expected = []
        for prompt in prompts:
            body = {"model": options.model, "prompt": list(prompt), "max_tokens": max_tokens}
            expected.append(list(fetch_json(url + "/v1/completions", body)["choices"][0]["token_ids"]))
        single.kill()
        return expected

    def rest_problems(self, timeout_s: float = 40.0, when: str = "") -> list[str]:
        """What the nodes still hold although nobody asks for anything; empty once it is nothing."""
        deadline = time.monotonic() + timeout_s
        while True:
            held = {}
            for node in self.nodes:
                try:
                    if left := left_over(node.state()):
                        held[node.name] = left
                except BadAnswer as error:
                    held[node.name] = {"state": str(error)}
            if not held or time.monotonic() > deadline:
                return [f"{when}{timeout_s:g} s after the last request: {held}"] if held else []
            time.sleep(0.1)

    def own_errors(self) -> list[str]:
        """The nodes that met errors of their own."""
        name = ("kvconnect_failures_total", (("reason", "internal"),))
        counts = {node.name: node.metrics().get(name, 0) for node in self.nodes}
        return [f"{name} met {n:.0f} errors of its own, see its log" for name, n in counts.items() if n]

    def tails(self) -> str:
        """The ends of all logs."""
        return "\n".join(actor.tail() for actor in [*self.nodes, *self.routers])

    def close(self) -> None:
        """End every process and remove the logs."""
        self.nursery.end()
        self._folder.cleanup()

    def _node(self, side: str, index: int, place: Place) -> Actor:
        options = self.options
        is_prefill = side == "prefill"
        name = f"{side}-{index}"
        self.side_ports[name] = free_port()
        extra = {
            "engine": options.engine,
            "host": place.host,
            "port": self.side_ports[name],
            # As between machines: by the engine, not through shared memory.
            "protocol": PROTOCOLS.get(options.engine, "auto"),
            **DEADLINES,
            **options.extra,
        }
        config = {
            "kv_role": "kv_producer" if is_prefill else "kv_consumer",
            "kv_load_failure_policy": options.policy,
            "kv_connector_extra_config": extra,
        }
        arguments = ["serve", "--model", options.model, "--host", place.http_host]
        arguments += ["--port", str(free_port())]
        arguments += _common(options)
        if not is_prefill:
            arguments += ["--reserved-blocks", str(RESERVED_BLOCKS)]
        arguments += ["--kv-transfer-config", json.dumps(config)]
        return Actor(self, name, arguments, place.namespace)


def _common(options: StageOptions) -> tuple[str, ...]:
    # Without it a prompt that was asked before would not be fetched again.
    made = ("--no-enable-prefix-caching", "--num-threads", "1", "--num-blocks", str(options.num_blocks))
    return (*made, *options.node)


def left_over(state: Any) -> dict[str, Any]:
    """What a node at rest should not hold, of its state."""
    blocks = state["blocks"]
    left: dict[str, Any] = {}
    if blocks["held"] or blocks["free"] + blocks["held"] != blocks["total"]:
        left["blocks"] = blocks
    for name, value in state.get("connector", {}).items():
        if isinstance(value, int) and value and name not in _NO_FAULT:
            left[name] = value
    return left


def wait_until(good: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for a condition. Returns the seconds that it took.

    Raises:
        ChildFailed: it did not come.
    """
    started = time.monotonic()
    while not good():
        if time.monotonic() - started > timeout_s:
            raise ChildFailed(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.02)
    return time.monotonic() - started
