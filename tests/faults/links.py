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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.peer.key_files import new_secret
from tests.faults.kills import wait_in_flight
from tests.faults.load import SALVO, Questions, Tally, salvo, submit
from tests.faults.reports import HitReport
from tests.faults.stage import DEADLINES, Place, Stage, StageOptions, wait_until

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
_REST_TIMEOUT_S = 40.0
_SERVING_TIMEOUT_S = 30.0


_wires = itertools.count()


class Wire:
    """Two namespaces and the wire between them; leaving the ``with`` block takes them away.

    Raises:
        ConfigError: it is not permitted here, or something is missing.
    """

    def __init__(self) -> None:
        self._number = (os.getpid() + next(_wires)) % 200 + 20
        self.namespaces = (f"kvcp{self._number}", f"kvcd{self._number}")
        if problem := unusable():
            raise ConfigError(problem)

    def __enter__(self) -> Wire:
        try:
            for namespace in self.namespaces:
                _ip("netns", "add", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            near, far = self.namespaces
            _ip("-n", near, "link", "add", "kvcw0", "type", "veth", "peer", "name", "kvcw1", "netns", far)
            for place, namespace in enumerate(self.namespaces):
                _ip("-n", namespace, "addr", "add", f"{self.host(place)}/24", "dev", f"kvcw{place}")
                _ip("-n", namespace, "link", "set", f"kvcw{place}", "up")
                ours, theirs = self._ours(place), f"kvcm{place}"
                _ip("link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", namespace)
                _ip("addr", "add", f"10.{202 + place}.{self._number}.1/24", "dev", ours)
                _ip("link", "set", ours, "up")
                _ip("-n", namespace, "addr", "add", f"{self.http_host(place)}/24", "dev", theirs)
                _ip("-n", namespace, "link", "set", theirs, "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def host(self, place: int) -> str:
        """The address in namespace 0 or 1 that the other one reaches over the wire."""
        return f"10.201.{self._number}.{place + 1}"

    def http_host(self, place: int) -> str:
        """The address in a namespace that we reach."""
        return f"10.{202 + place}.{self._number}.2"

    def place(self, number: int) -> Place:
        """A place for a node in a namespace."""
        return Place(self.host(number), self.http_host(number), self.namespaces[number])

    @contextmanager
    def cut(self, how: Cut) -> Iterator[None]:
        """Within this block nothing passes: the link is down, or what is sent into it is swallowed."""
        self.break_off(how)
        try:
            yield
        finally:
            self.heal()

    def break_off(self, how: Cut) -> None:
        """Cut the wire."""
        if how == "down":
            _ip("-n", self.namespaces[1], "link", "set", "kvcw1", "down")
            return
        for place, namespace in enumerate(self.namespaces):
            # An address that nobody has: everything leaves, and nothing arrives or is answered.
            _ip(
                "-n",
                namespace,
                "neigh",
                "replace",
                self.host(1 - place),
                "lladdr",
                _NOWHERE,
                "dev",
                f"kvcw{place}",
            )

    def heal(self) -> None:
        """Make the wire carry again. Does no harm where it does already."""
        for place, namespace in enumerate(self.namespaces):
            with suppress(KVConnectError):
                _ip("-n", namespace, "neigh", "del", self.host(1 - place), "dev", f"kvcw{place}")
        _ip("-n", self.namespaces[1], "link", "set", "kvcw1", "up")

    def _ours(self, place: int) -> str:
        return f"kvcm{place}x{self._number}"

    def _remove(self) -> None:
        for place, namespace in enumerate(self.namespaces):
            # A namespace lives until the last connection in it is over: its wire must not.
            for arguments in (("link", "del", self._ours(place)), ("netns", "del", namespace)):
                with suppress(KVConnectError):
                    _ip(*arguments)


def unusable() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2) here"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    probe = f"kvct{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "kvct0", "type", "veth", "peer", "name", "kvct1")
        finally:
            _ip("netns", "del", probe)
    except KVConnectError as error:
        return f"network namespaces are not permitted here: {error}"
    return ""


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVConnectError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@dataclass
class LinkReport(HitReport):
    """``healed_s`` are the seconds from the end of the fault until a fetch worked again without a restart."""

    engine: str
    fault: str
    policy: str
    healed_s: float = 0.0


def link_stage(wire: Wire, engine: str, policy: str) -> StageOptions:
    """A pair over a wire, with a second prefill node on the decode node's side of it, and a key for all."""
    extra = {"max_inflight_bytes": 4 << 20}
    return StageOptions(
        engine,
        policy=policy,
        extra=extra,
        prefills=(wire.place(0), wire.place(1)),
        decodes=(wire.place(1),),
        environment={"KVCONNECT_KEY": new_secret()},
    )


def run_cut(
    stage: Stage,
    questions: Questions,
    wire: Wire,
    how: Cut,
    lasts_s: float,
    *,
    mid_transfer: bool = True,
) -> LinkReport:
    """Cut the wire for ``lasts_s`` seconds, in the middle of transfers or before a new decode node meets P.

    Raises:
        KVConnectError: a node does not answer any more.
    """
    when = "mid-transfer" if mid_transfer else "before they meet"
    report = LinkReport(stage.options.engine, f"{how} for {lasts_s:g} s, {when}", stage.options.policy)
    tally = Tally()
    with ThreadPoolExecutor(2 * SALVO) as pool:
        if mid_transfer:
            ended = salvo(questions, pool, tally, stage.prefill, stage.decode)
            seen = wait_in_flight(stage.decode)
            with wire.cut(how):
                report.hits = int(seen and not all(future.done() for future in ended))
                time.sleep(lasts_s)
        else:
            handed = [(index, questions.prefill(stage.prefill, index)) for index in range(SALVO)]
            stage.decode.kill()
            stage.decode.start()
            stage.decode.wait_ready()
            with wire.cut(how):
                ended = [
                    submit(questions, pool, tally, stage.decode.url, index, params)
                    for index, params in handed
                ]
                time.sleep(lasts_s)
            report.hits = len(ended)
        healed = time.monotonic()
        for future in ended:
            future.result()
    wait_until(questions.are_fetched, _SERVING_TIMEOUT_S, "a fetch over the healed wire")
    report.healed_s = round(time.monotonic() - healed, 2)
    if problem := stage.at_rest_problem(_REST_TIMEOUT_S):
        report.problems.append(problem)
    report.take(tally)
    return report


def link_deadline_s() -> float:
    """By when a client over a cut wire must have its answer: a load's deadline, quarantine, and slack."""
    return DEADLINES["load_timeout_s"] + 15.0 + 10.0
