"""A host: one node after the other, as they are started and killed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvconnect.transfer.params import HANDLE_KEY
from tests.simulator.checks import Checks
from tests.simulator.network import Network
from tests.simulator.node import SimNode
from tests.simulator.request import Request
from tests.simulator.scenario import NodePlan


class Host:
    """Where a node runs. ``past`` are the nodes that were killed: their memory is kept until the end.

    ``handle`` is the last one that a router saw of it and vouches for its address; empty where none expires.
    """

    def __init__(self, network: Network, checks: Checks, plan: NodePlan) -> None:
        self.plan = plan
        self.past: list[SimNode] = []
        self.handle = ""
        self._world, self._network, self._checks = network.world, network, checks
        self.node = SimNode(network, checks, plan, 1)

    @property
    def port(self) -> int:
        """Where rank 0 listens, or listened last."""
        return self.node.ports[0]

    def vouches(self, params: Mapping[str, Any]) -> None:
        """A router saw what it answered."""
        if self.plan.handles is not None:
            self.handle = params[HANDLE_KEY]

    def submit(self, request: Request) -> None:
        """A request arrives; a host without a node refuses it."""
        if self.node.is_dead:
            request.outcome = "failed"
            request.done(request)
        else:
            self.node.submit(request)

    def abort(self, request_id: str) -> None:
        """A client left."""
        if not self.node.is_dead:
            self.node.abort(request_id)

    def kill(self) -> None:
        """SIGKILL."""
        if not self.node.is_dead:
            self._world.note(self.plan.host, "is killed")
            self.node.kill()

    def drain(self) -> None:
        """SIGTERM: it is given the time to end what it promised."""
        if not self.node.is_dead:
            self._world.note(self.plan.host, "drains")
            self.node.drain()

    def start(self) -> None:
        """Start anew, if it does not run."""
        if self.node.is_dead:
            self.past.append(self.node)
            ports = self.node.ports if self.plan.keeps_ports else ()
            number = len(self.past) + 1
            self._world.note(self.plan.host, "starts", number)
            self.node = SimNode(self._network, self._checks, self.plan, number, ports)

    def stop(self) -> None:
        """SIGSTOP."""
        if not self.node.is_dead and not self.node.is_stopped:
            self._world.note(self.plan.host, "is stopped")
            self.node.stop()
            for port in self.node.ports:
                self._network.silence(port)

    def go_on(self) -> None:
        """SIGCONT."""
        if self.node.is_stopped and not self.node.is_dead:
            self._world.note(self.plan.host, "goes on")
            self.node.go_on()
