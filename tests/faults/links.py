"""Two network namespaces with a wire between them, and what happens to a pair when the wire does not carry.

Needs root on Linux. Each namespace also has a wire to where we are, over which the nodes are asked: only what
nodes say to each other is cut.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal, Self

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.peer.keyring import new_secret
from tests.faults.signals import wait_in_flight
from tests.faults.stage import (
    DEADLINES,
    HitReport,
    Place,
    Questions,
    StageOptions,
    Traffic,
    progress,
    wait_until,
)

Cut = Literal["down", "blackhole"]

CUTS: tuple[tuple[Cut, float, bool], ...] = (
    ("down", 1.0, True),
    ("blackhole", 1.0, True),
    ("blackhole", 12.0, True),
    ("down", 20.0, True),
    ("blackhole", 6.0, False),
)
"""How the wire is cut, for how many seconds, and whether in the middle of transfers."""

_NOWHERE = "02:00:00:00:de:ad"
_SERVING_TIMEOUT_S = 30.0


_numbers = itertools.count()


class Namespaces:
    """Two network namespaces; leaving the ``with`` block takes them away, and what was made in them.

    Raises:
        ConfigError: it is not permitted here, or something is missing.
    """

    def __init__(self, name: str) -> None:
        self.number = (os.getpid() + next(_numbers)) % 200 + 20
        self.namespaces = (f"{name}p{self.number}", f"{name}d{self.number}")
        if problem := unusable():
            raise ConfigError(problem)

    def __enter__(self) -> Self:
        try:
            for namespace in self.namespaces:
                run_ip(f"netns add {namespace}")
                run_ip(f"-n {namespace} link set lo up")
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for namespace in self.namespaces:
            with suppress(KVConnectError):
                run_ip(f"netns del {namespace}")

    def make(self) -> None:
        """What is in them."""

    def end(self) -> None:
        """Take away what would outlive them."""


class Wire(Namespaces):
    """Two namespaces and the wire between them."""

    def __init__(self) -> None:
        super().__init__("kvc")

    def make(self) -> None:
        """The wire, and one from each namespace to where we are."""
        near, far = self.namespaces
        run_ip(f"-n {near} link add kvcw0 type veth peer name kvcw1 netns {far}")
        for place, namespace in enumerate(self.namespaces):
            run_ip(f"-n {namespace} addr add {self.host(place)}/24 dev kvcw{place}")
            run_ip(f"-n {namespace} link set kvcw{place} up")
        for place, namespace in enumerate(self.namespaces):
            wait_running(namespace, f"kvcw{place}")
            ours, theirs = self._ours(place), f"kvcm{place}"
            run_ip(f"link add {ours} type veth peer name {theirs} netns {namespace}")
            run_ip(f"addr add 10.{202 + place}.{self.number}.1/24 dev {ours}")
            run_ip(f"link set {ours} up")
            run_ip(f"-n {namespace} addr add {self.http_host(place)}/24 dev {theirs}")
            run_ip(f"-n {namespace} link set {theirs} up")

    def end(self) -> None:
        """A namespace lives until the last connection in it is over: its wire must not."""
        for place in range(2):
            with suppress(KVConnectError):
                run_ip(f"link del {self._ours(place)}")

    def host(self, place: int) -> str:
        """The address in namespace 0 or 1 that the other one reaches over the wire."""
        return f"10.201.{self.number}.{place + 1}"

    def http_host(self, place: int) -> str:
        """The address in a namespace that we reach."""
        return f"10.{202 + place}.{self.number}.2"

    def place(self, number: int) -> Place:
        """A place for a node in a namespace."""
        return Place(self.host(number), self.http_host(number), self.namespaces[number])

    @contextmanager
    def cut(self, how: Cut) -> Iterator[None]:
        """Within this block nothing passes: the link is down, or what is sent into it is swallowed."""
        places = list(enumerate(self.namespaces))
        if how == "down":
            run_ip(f"-n {self.namespaces[1]} link set kvcw1 down")
        else:
            for place, namespace in places:
                # An address that nobody has: everything leaves, and nothing arrives or is answered.
                run_ip(
                    f"-n {namespace} neigh replace {self.host(1 - place)} lladdr {_NOWHERE} dev kvcw{place}"
                )
        try:
            yield
        finally:
            for place, namespace in places:
                with suppress(KVConnectError):
                    run_ip(f"-n {namespace} neigh del {self.host(1 - place)} dev kvcw{place}")
            run_ip(f"-n {self.namespaces[1]} link set kvcw1 up")

    def _ours(self, place: int) -> str:
        return f"kvcm{place}x{self.number}"


def unusable() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2) here"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    probe = f"kvct{os.getpid()}"
    try:
        run_ip(f"netns add {probe}")
        try:
            run_ip(f"-n {probe} link add kvct0 type veth peer name kvct1")
        finally:
            run_ip(f"netns del {probe}")
    except KVConnectError as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


def run_ip(command: str) -> str:
    """Run ``ip`` of iproute2 and return what it prints. Raises ``KVConnectError``."""
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVConnectError(f"ip {command}: {done.stderr.strip()}")
    return done.stdout


def wait_running(namespace: str, device: str) -> None:
    """Wait for the carrier of a device whose both ends are up.

    The kernel tells of a carrier later than ``ip`` returns, and UCX passes over a device without one.
    """
    shown = f"-n {namespace} link show dev {device}"
    wait_until(lambda: "state UP" in run_ip(shown), 30.0, f"the carrier of {device} in {namespace}")


@dataclass
class LinkReport(HitReport):
    """``healed_s`` are the seconds from the end of the fault until a fetch worked again without a restart."""

    engine: str
    fault: str
    policy: str
    healed_s: float = 0.0


def link_stage(wire: Wire, engine: str, policy: str) -> StageOptions:
    """A pair over a wire, with a second prefill node on the decode node's side of it, and a key for all."""
    return StageOptions(
        engine,
        policy=policy,
        extra={"max_inflight_bytes": 4 << 20},
        prefills=(wire.place(0), wire.place(1)),
        decodes=(wire.place(1),),
        environment={"KVCONNECT_KEY": new_secret()},
        lengths=(1024, 777, 1024, 300),
        # A load's deadline, quarantine, and slack.
        deadline_s=DEADLINES["load_timeout_s"] + 15.0 + 10.0,
    )


def run_cut(questions: Questions, wire: Wire, how: Cut, lasts_s: float, mid_transfer: bool) -> LinkReport:
    """Cut the wire for ``lasts_s`` seconds, in the middle of transfers or before a new decode node meets P.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    stage = questions.stage
    when = "mid-transfer" if mid_transfer else "before they meet"
    report = LinkReport(stage.options.engine, f"{how} for {lasts_s:g} s, {when}", stage.options.policy)
    with Traffic(questions) as traffic:
        if mid_transfer:
            ended = traffic.salvo()
            seen = wait_in_flight(stage.decode)
            with wire.cut(how):
                report.hits = int(seen and not all(future.done() for future in ended))
                time.sleep(lasts_s)
        else:
            handed = traffic.prefilled()
            stage.decode.kill()
            stage.decode.start()
            stage.decode.wait_ready()
            with wire.cut(how):
                ended = traffic.fetch(handed)
                time.sleep(lasts_s)
            report.hits = len(ended)
        healed = time.monotonic()
        for future in ended:
            future.result()
    wait_until(questions.are_fetched, _SERVING_TIMEOUT_S, "a fetch over the healed wire")
    report.healed_s = round(time.monotonic() - healed, 2)
    report.problems += stage.rest_problems()
    report.take(traffic.tally)
    progress(f"{report.fault}: {len(report.problems)} problems")
    return report
