"""Two nodes of two ranks each, with a link of its own for every rank: two namespaces, two wires.

Both nodes are given one configuration, and a rank finds its address in the network of its link.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from benchmarks.cache import CacheShape
from benchmarks.process import ChildProcess, StepFailed
from benchmarks.worker import Round, WorkerAddress, WorkerSide
from kvconnect.addresses import RankAddress
from kvconnect.node.children import Child
from kvconnect.node.pair_demo import PROTOCOLS
from kvconnect.peer.keyring import new_secret
from kvconnect.transfer.orders import Orders
from tests.faults.links import Namespaces, run_ip, wait_running
from tests.nursery import nodes_nursery
from tests.ports import free_port

RANKS = 2
_BLOCK_TOKENS, _BLOCKS = 64, 256
_SHAPE = CacheShape(4, 2 * _BLOCKS + 8, 1, 128, _BLOCK_TOKENS)
REQUEST_BYTES = _BLOCKS * _SHAPE.block_bytes
"""What one rank sends of a request."""
_SIOCSIFFLAGS = 0x8914
DEADLINES = {"lease_s": 4.0, "peer_timeout_s": 3.0, "load_timeout_s": 5.0, "transfer_timeout_s": 3.0}
LONGEST_S = DEADLINES["load_timeout_s"] + DEADLINES["lease_s"] + 5.0
"""What a request takes to end on both nodes, and slack."""


class RailSide(WorkerSide):
    """One rank of a node, in the namespace that has its link."""

    def know(self, directory: Sequence[RankAddress]) -> None:
        """Where the ranks of its node listen."""
        self.connector.start(Orders(directory=tuple(directory)))

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


class _Forked(Child):
    """A process in a namespace that runs ``code``, forked by one that has imported what it needs."""

    def __init__(self, log: Path, environment: Mapping[str, str], namespace: str, code: str) -> None:
        super().__init__(log.stem, (), log, environment)
        self._where, self._code = namespace, code + "; raise SystemExit"

    def _spawn(self) -> Any:
        assert self.log is not None
        nursery, given = nodes_nursery(), self._environment
        return nursery.start((), self.log, environment=given, namespace=self._where, before=self._code)


class Rank(ChildProcess):
    """A process with a ``RailSide`` in a namespace."""

    def __init__(self, name: str, namespace: str, environment: Mapping[str, str], folder: Path) -> None:
        self.name, self._timeout_s, self._step = name, 60.0, "start"
        place = str(folder / f"{name}.socket")
        code = "from multiprocessing.connection import Client; from benchmarks.process import serve; "
        code += f"pipe = Client({place!r}); serve(pipe.fileno(), {__name__ + ':RailSide'!r})"
        self._child = _Forked(folder / f"{name}.log", environment, namespace, code)
        with Listener(place) as listener:
            self._child.start()
            self._pipe = listener.accept()


class Rails(Namespaces):
    """Both nodes and their links, ``prefill`` and ``decode`` by rank; leaving the ``with`` block ends all."""

    def __init__(self, engine: str, families: tuple[int, ...]) -> None:
        super().__init__("kvr")
        forms = {4: f"10.{{}}.{self.number}.{{{{}}}}/24", 6: f"fd77:{{}}:{self.number}::{{{{}}}}/64"}
        self._links = [forms[family].format(205 + rank) for rank, family in enumerate(families)]
        networks = [link.format("" if ":" in link else 0) for link in self._links]
        self._settings: dict[str, Any] = {
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
        self._environment = {
            "KVCONNECT_KEY": new_secret(),
            "OMP_NUM_THREADS": "1",
            "MC_USE_IPV6": "1",
            # Two namespaces of one machine have memory in common, and UCX would move bytes there.
            "UCX_TLS": "tcp",
        }
        self._ends = ExitStack()
        self._folder = Path(self._ends.enter_context(tempfile.TemporaryDirectory()))

    def make(self) -> None:
        """The links, and a process for every rank."""
        near, far = self.namespaces
        for rank, link in enumerate(self._links):
            run_ip(f"-n {near} link add rail{rank} type veth peer name rail{rank} netns {far}")
            for place, namespace in enumerate(self.namespaces):
                at_once = " nodad" if ":" in link else ""
                run_ip(f"-n {namespace} addr add {link.format(place + 1)} dev rail{rank}{at_once}")
                run_ip(f"-n {namespace} link set rail{rank} up")
            for namespace in self.namespaces:
                wait_running(namespace, f"rail{rank}")
        self.prefill, self.decode = (
            [self._rank(role, namespace, rank) for rank in range(RANKS)]
            for role, namespace in zip(("kv_producer", "kv_consumer"), self.namespaces, strict=True)
        )
        ranks = [*self.prefill, *self.decode]
        addresses: list[WorkerAddress] = [one.answer() for one in ranks]
        self._source = addresses[0]
        for one in self.prefill:
            one.ask("know", [address.rank for address in addresses[:RANKS]])

    def _rank(self, role: str, namespace: str, rank: int) -> Rank:
        one = Rank(f"{role} {rank}", namespace, self._environment, self._folder)
        self._ends.callback(one.end, 0.0)
        seed = rank if role == "kv_producer" else None
        stated = {"kv_role": role, "engine_id": role}
        one.begin("open", stated, "cpu", _SHAPE, seed, LONGEST_S, self._settings, rank, RANKS)
        return one

    def end(self) -> None:
        self._ends.close()

    def hand_over(self, name: str) -> Round:
        """Have both ranks of P hold a request and both of D begin to load it."""
        asked = Round(name, 1, 1, _BLOCKS * _BLOCK_TOKENS)
        for number, one in enumerate([*self.prefill, *self.decode]):
            # Other blocks for every request, and on either side.
            one.ask("draw", 1, _BLOCKS, hash((name, number)))
        for one in self.decode:
            one.ask("clear")
        for one in self.prefill:
            one.ask("hold", asked)
        for one in self.decode:
            one.begin("load", asked, self._source)
        return asked

    def wait(self, asked: Round) -> list[str]:
        """What became of a request on each rank: nothing if it has the right bytes, else why it has not.

        Raises:
            StepFailed: a rank of P has not let go of it in time.
        """
        said = []
        for one in self.decode:
            try:
                one.answer()
                said.append("")
            except StepFailed as error:
                said.append(str(error))
        for one in self.prefill:
            one.ask("drain", asked)
        for rank, (near, far) in enumerate(zip(self.prefill, self.decode, strict=True)):
            held, landed = (one.ask("digests", [0]) for one in (near, far))
            if not said[rank] and (held != landed).any():
                said[rank] = "other bytes"
        return said
