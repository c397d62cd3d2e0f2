"""Two nodes of two ranks each, with a link of its own for every rank: two namespaces, two wires.

Both nodes are given one configuration, and a rank finds its address in the network of its link. Run as a
module this is one node: a line of JSON that asks for something, and a line with the answer.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from kvconnect.addresses import RankAddress
from kvconnect.cache.region_table import CacheTensor
from kvconnect.cache.shard import HeadInterval
from kvconnect.cache.specs import FullAttentionSpec, KVCacheConfig, KVCacheGroup, UniformTypeSpec
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.halves.worker_half import TransferWorker
from kvconnect.node.pair_demo import PROTOCOLS
from kvconnect.peer.keyring import new_secret
from kvconnect.peer.messages import CacheMeaning
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Load, Orders
from tests.faults.links import run_ip, unusable
from tests.identities import named
from tests.ports import free_port

RANKS = 2
LAYERS = ("layer0", "layer1", "layer2", "layer3")
BLOCK, HEAD_SIZE, TOKENS, NUM_BLOCKS = 64, 128, 16384, 520
REQUEST_BYTES = len(LAYERS) * TOKENS * 2 * HEAD_SIZE * 2
"""What one rank sends of a request."""
_SIOCSIFFLAGS = 0x8914
DEADLINES = {"lease_s": 4.0, "peer_timeout_s": 3.0, "load_timeout_s": 5.0, "transfer_timeout_s": 3.0}


class Rails:
    """Both nodes and their links; leaving the ``with`` block ends all. Raises ``ConfigError``: not here."""

    def __init__(self, engine: str, families: tuple[int, ...]) -> None:
        if problem := unusable():
            raise ConfigError(problem)
        number = os.getpid() % 200 + 20
        self.namespaces = (f"kvrp{number}", f"kvrd{number}")
        forms = {4: f"10.{{}}.{number}.{{{{}}}}/24", 6: f"fd77:{{}}:{number}::{{{{}}}}/64"}
        self._links = [forms[family].format(205 + rank) for rank, family in enumerate(families)]
        networks = [link.format("" if ":" in link else 0) for link in self._links]
        extra = {
            "engine": engine,
            "protocol": PROTOCOLS[engine],
            "host": networks[0],
            "ranks": {"1": {"host": networks[1]}},
            "allow_peers": networks,
            "port": free_port(),
            "slot_bytes": 1 << 20,
            "max_inflight_bytes": 4 << 20,
            **DEADLINES,
        }
        environment = {
            **os.environ,
            "KVCONNECT_KEY": new_secret(),
            "OMP_NUM_THREADS": "1",
            "MC_USE_IPV6": "1",
        }
        # Two namespaces of one machine have memory in common, and UCX would move bytes there.
        environment["UCX_TLS"] = "tcp"
        self._settings = [("kv_producer", extra), ("kv_consumer", extra)]
        self._environment = environment
        self._nodes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Rails:
        try:
            near, far = self.namespaces
            for namespace in self.namespaces:
                run_ip(f"netns add {namespace}")
                run_ip(f"-n {namespace} link set lo up")
            for rank, link in enumerate(self._links):
                run_ip(f"-n {near} link add rail{rank} type veth peer name rail{rank} netns {far}")
                for place, namespace in enumerate(self.namespaces):
                    at_once = " nodad" if ":" in link else ""
                    run_ip(f"-n {namespace} addr add {link.format(place + 1)} dev rail{rank}{at_once}")
                    run_ip(f"-n {namespace} link set rail{rank} up")
            for namespace, (role, extra) in zip(self.namespaces, self._settings, strict=True):
                command = ["ip", "netns", "exec", namespace, sys.executable, "-m", __name__]
                pipe = subprocess.PIPE
                self._nodes.append(
                    subprocess.Popen(
                        [*command, json.dumps({"kv_role": role, "engine_id": role, "extra": extra})],
                        stdin=pipe,
                        stdout=pipe,
                        text=True,
                        env=self._environment,
                    )
                )
            directory = self.ask(0, "directory")
            for place in range(2):
                self.ask(place, "know", directory)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.kill()
            node.wait()
        for namespace in self.namespaces:
            with suppress(KVConnectError):
                run_ip(f"netns del {namespace}")

    def ask(self, place: int, what: str, *arguments: Any) -> Any:
        """What the node in a namespace answers. Raises ``KVConnectError``: it ended."""
        node = self._nodes[place]
        assert node.stdin is not None
        assert node.stdout is not None
        with suppress(BrokenPipeError):
            print(json.dumps([what, *arguments]), file=node.stdin, flush=True)
        for line in iter(node.stdout.readline, ""):
            if line.startswith("{"):
                return json.loads(line)["answer"]
        raise KVConnectError(f"the node in {self.namespaces[place]} ended")

    def hand_over(self, name: str) -> None:
        """Have both ranks of P hold a request and both of D load it."""
        self.ask(0, "hold", name)
        self.ask(1, "load", name)

    def wait(self, name: str, timeout_s: float) -> list[str]:
        """What each rank of D has said of a request: nothing if it was received, else why it was not."""
        return self._wait(1, name, timeout_s)

    def wait_let_go(self, name: str, timeout_s: float) -> None:
        """Wait until both ranks of P have let go of a request."""
        self._wait(0, name, timeout_s)

    def _wait(self, place: int, name: str, timeout_s: float) -> list[str]:
        deadline = time.monotonic() + timeout_s
        while True:
            ended: list[dict[str, str]] = self.ask(place, "ended")
            if all(name in one for one in ended):
                return [one[name] for one in ended]
            if time.monotonic() > deadline:
                raise KVConnectError(f"after {timeout_s:g} s {name} has not ended: {ended}")
            time.sleep(0.01)


class Node:
    """One node: a worker for every rank, as its stack would have them in processes of their own."""

    def __init__(self, kv_role: str, engine_id: str, extra: dict[str, Any]) -> None:
        config = parse_kv_transfer_config(
            {"kv_role": kv_role, "engine_id": engine_id, "kv_connector_extra_config": extra}
        )
        self._is_source = config.is_producer
        self._workers = []
        self._caches = []
        self._failures = [Counter[str]() for _ in range(RANKS)]
        self._ended: list[dict[str, str]] = [{} for _ in range(RANKS)]
        self._directory: tuple[RankAddress, ...] = ()
        spec = FullAttentionSpec(BLOCK, 1, HEAD_SIZE, torch.bfloat16)
        group = KVCacheGroup(LAYERS, UniformTypeSpec(dict.fromkeys(LAYERS, spec)))
        for rank in range(RANKS):
            shape = (NUM_BLOCKS, BLOCK, 1, 2 * HEAD_SIZE)
            cache = {name: torch.zeros(shape, dtype=torch.bfloat16) for name in LAYERS}
            worker = TransferWorker(
                config,
                KVCacheConfig(NUM_BLOCKS, (group,)),
                {0: BLOCK},
                CacheMeaning(named(), RANKS, RANKS),
                rank=rank,
                registry=CollectorRegistry(),
            )
            tensors = {name: CacheTensor(cache[name], "block token head content") for name in LAYERS}
            worker.register_kv_caches(tensors, dict.fromkeys(LAYERS, HeadInterval(rank, rank + 1)))
            self._workers.append(worker)
            self._caches.append(cache)

    def directory(self) -> list[tuple[int, str, int]]:
        """Where the ranks listen."""
        return [(one.rank, one.host, one.port) for one in (worker.address() for worker in self._workers)]

    def know(self, directory: list[tuple[int, str, int]]) -> None:
        """Where the ranks of P listen."""
        self._directory = tuple(RankAddress(*one) for one in directory)
        if self._is_source:
            for worker in self._workers:
                worker.start(Orders(directory=self._directory))

    def sent_bytes(self, rank: int) -> int:
        """What has left over the link of a rank. In the namespace alone is the link under this name."""
        return int(Path(f"/sys/class/net/rail{rank}/statistics/tx_bytes").read_text())

    def cut(self, rank: int, at_bytes: int) -> None:
        """Take the link of a rank down as soon as it has sent so much: no process is started for that."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            name = f"rail{rank}".encode()
            while self.sent_bytes(rank) < at_bytes:
                time.sleep(0.0005)
            fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh", name, 0))

    def hold(self, name: str) -> None:
        """Compute a request, and hold it."""
        for rank, worker in enumerate(self._workers):
            for layer, pages in self._pages(rank, name).items():
                self._caches[rank][layer][list(_blocks(self._is_source))] = pages
            held = Hold(name, name, TOKENS, (GroupBlocks(0, 0, _blocks(True)),), DEADLINES["lease_s"], 0)
            worker.start(Orders(holds=(held,)))

    def load(self, name: str) -> None:
        """Load a request."""
        first = self._directory[0]
        groups = (GroupBlocks(0, 0, _blocks(False)),)
        for worker in self._workers:
            worker.start(
                Orders(loads=(Load(name, name, "kv_producer", first.host, first.port, TOKENS, groups),))
            )

    def ended(self) -> list[dict[str, str]]:
        """What each rank has reported by request: nothing, or why it failed."""
        for rank, worker in enumerate(self._workers):
            results = worker.results()
            self._ended[rank] |= dict.fromkeys((*results.received, *results.sent), "") | {
                name: why.text for name, why in results.failed.items()
            }
        return self._ended

    def same(self, name: str) -> list[bool]:
        """Whether each rank has the bytes of a request."""
        return [
            all(
                torch.equal(self._caches[rank][layer][list(_blocks(False))], pages)
                for layer, pages in self._pages(rank, name).items()
            )
            for rank in range(RANKS)
        ]

    def failures(self) -> list[dict[str, int]]:
        """What went wrong on each rank, by the metric's reason."""
        for rank, worker in enumerate(self._workers):
            changes = worker.changes()
            for reason, growth in (changes.counters.get("failures", {}) if changes else {}).items():
                self._failures[rank][reason] += int(growth)
        return [dict(one) for one in self._failures]

    def _pages(self, rank: int, name: str) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(sum(name.encode()) * RANKS + rank)
        shape = (TOKENS // BLOCK, BLOCK, 1, 2 * HEAD_SIZE)
        return {layer: torch.randn(shape, generator=generator).bfloat16() for layer in LAYERS}


def _blocks(is_source: bool) -> tuple[int, ...]:
    count = TOKENS // BLOCK
    return tuple(range(1, count + 1) if is_source else range(NUM_BLOCKS - 1, NUM_BLOCKS - 1 - count, -1))


def main() -> None:
    """Be one node, until the input ends."""
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    node = Node(**given)
    asked: dict[str, Callable[..., Any]] = {
        name: getattr(node, name)
        for name in ("directory", "know", "sent_bytes", "cut", "hold", "load", "ended", "same", "failures")
    }
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps({"answer": asked[what](*arguments)}), flush=True)
    # Engines' libraries may stumble over an interpreter's end.
    os._exit(0)


if __name__ == "__main__":
    main()
