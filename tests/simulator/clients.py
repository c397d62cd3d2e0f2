"""Hosts, and clients with the router between them and the nodes, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvconnect.peer.handles import Handles
from kvconnect.transfer.params import HANDLE_KEY, HINTS_KEY, PEER_KEY, SOURCES_KEY
from tests.simulator.checks import Checks
from tests.simulator.network import Network
from tests.simulator.node import SimNode
from tests.simulator.request import SimRequest
from tests.simulator.scenario import Hint, NodePlan, ReplayPlan, RequestPlan
from tests.simulator.world import World


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

    def submit(self, request: SimRequest) -> None:
        """A request arrives; a host without a node refuses it."""
        if self.node.is_dead:
            request.end("failed")
        else:
            self.node.submit(request)

    def abort(self, request_id: str) -> None:
        """A client left."""
        if not self.node.is_dead:
            self.node.abort(request_id)

    def kill(self) -> None:
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
        if not self.node.is_dead and not self.node.is_stopped:
            self._world.note(self.plan.host, "is stopped")
            self.node.stop()
            for port in self.node.ports:
                self._network.silence(port)

    def go_on(self) -> None:
        if self.node.is_stopped and not self.node.is_dead:
            self._world.note(self.plan.host, "goes on")
            self.node.go_on()


_PREFILL: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}


class Client:
    """One client's request, from its start to its answer. ``outcome`` is what it was told.

    ``asks_at`` is when it has asked all that it can ask by itself. ``told`` are called with the parameters
    that the router passes on. ``is_forged``: these are of no use.
    """

    def __init__(self, world: World, hosts: Mapping[str, Host], plan: RequestPlan) -> None:
        self.plan = plan
        self.name = f"r{plan.number}"
        self.outcome = ""
        self.is_forged = False
        self.told: list[Callable[[Mapping[str, Any]], None]] = []
        self._world = world
        self._hosts = hosts
        self.asks_at = world.now + plan.start_s + plan.forward_s
        self._open: dict[str, tuple[Host, SimRequest]] = {}
        self._answers: list[str] = []
        # The request before it in a conversation, and whom the answer of this one names as sources.
        self.turn_of: Client | None = None
        self.answered_by: tuple[str, ...] = ()
        world.after(plan.start_s, self._start)
        if plan.leaves_s is not None:
            world.after(plan.start_s + plan.leaves_s, self._leave)

    @property
    def is_over(self) -> bool:
        """It has its answer, and nothing is asked for it any more."""
        return bool(self.outcome) and not self._open

    def _start(self) -> None:
        plan = self.plan
        if plan.flow == "sequential":
            self._prefill(dict(_PREFILL), self._forward)
        elif plan.flow == "parallel":
            transfer = f"t{plan.number}"
            self._prefill({**_PREFILL, "transfer_id": transfer}, lambda request: None)
            target = self._hosts[plan.prefill]
            params = {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "transfer_id": transfer,
                "remote_host": plan.prefill,
                "remote_port": target.port,
            }
            if target.handle:
                params[PEER_KEY] = target.handle
            self._tell(params)
            self._world.after(plan.forward_s, lambda: self._decode(params))
        else:
            self._decode(None)

    def _prefill(self, params: dict[str, Any], then: Any) -> None:
        self._ask(self._hosts[self.plan.prefill], f"{self.name}-p", 1, params, then)

    def _forward(self, request: SimRequest) -> None:
        """The prefill is done: its parameters go to the decode node, or none if it came to nothing."""
        params = request.answer if request.outcome == "done" else None
        # A node that shall end holds nothing any more, and answers hints all the same.
        if params is not None and HANDLE_KEY in params:
            self._hosts[self.plan.prefill].vouches(params)
            self._tell(params)
        self._world.after(self.plan.forward_s, lambda: self._decode(params))

    def _tell(self, params: Mapping[str, Any]) -> None:
        for told in self.told:
            told(params)

    def _decode(self, params: Mapping[str, Any] | None) -> None:
        if self.outcome:
            return
        for copy in range(self.plan.copies):
            name = f"{self.name}-d{copy}"
            self._ask(self._hosts[self.plan.decode], name, self.plan.max_tokens, params, self._answered)

    def _answered(self, request: SimRequest) -> None:
        self._answers.append(request.outcome)
        self.answered_by = tuple((request.answer or {}).get(SOURCES_KEY, ()))
        if len(self._answers) == self.plan.copies and not self.outcome:
            self.outcome = ",".join(self._answers)

    def _ask(
        self, host: Host, name: str, max_tokens: int, params: Mapping[str, Any] | None, then: Any
    ) -> None:
        def done(request: SimRequest) -> None:
            self._open.pop(name, None)
            then(request)

        session = self.plan.session if host.plan.keeps is not None else None
        request = SimRequest(
            name,
            self.plan.prompt,
            max_tokens,
            done,
            self._with_hints(host, self._with_sources(params)),
            # What a node computes itself is right there.
            is_strange=host.plan.is_stranger
            or (self.plan.is_strange and (host.plan.keeps is not None or not name.endswith("-p"))),
            is_forged=self.is_forged,
            session=session,
        )
        self._open[name] = (host, request)
        host.submit(request)

    def _with_sources(self, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The parameters, and where its KV may be: as a client or a router says, who may lie."""
        known = [] if self.turn_of is None else list(self.turn_of.answered_by)
        for hint in self.plan.sources:
            known += self._addresses(hint)
        return {**(params or {}), SOURCES_KEY: known} if known else params

    def _with_hints(self, host: Host, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The parameters, and what is to be done for the session, with whose it is."""
        session, keeps = self.plan.session, host.plan.keeps
        if session is None or keeps is None:
            return params
        hints = {HINTS_KEY: session.envelope, "session_id": session.session_id} if session.in_params else {}
        tenant = {keeps.tenant_key: session.tenant} if keeps.tenant_key else {}
        return {**(params or {}), **hints, **tenant}

    def _addresses(self, hint: str) -> list[str]:
        match hint:
            case Hint.NOBODY:
                return ["nobody:9999"]
            case Hint.RANK_1:
                # Where no rank 0 listens.
                return [f"{host.plan.host}:{host.node.ports[-1]}" for host in self._hosts.values()][:2]
            case Hint.TOO_MANY:
                return [f"many:{port}" for port in range(1000, 1100)]
            case Hint.NO_ADDRESS:
                return ["what is this"]
        return [f"{hint}:{self._hosts[hint].port}"]

    def _leave(self) -> None:
        if not self.outcome:
            self._world.note("client", "leaves", self.plan.number)
            self.outcome = "left"
        for name, (host, _) in list(self._open.items()):
            host.abort(name)


_LONG_AGO_S = 1000.0
_OTHER_SECRET = b"a secret of another cluster"


class Thief(Client):
    """A client that asks a decode node with what a router told another one's.

    Args:
        number: tells it apart from others.
        secret: what the cluster signs with.
    """

    def __init__(
        self,
        world: World,
        hosts: Mapping[str, Host],
        plan: ReplayPlan,
        victim: Client,
        number: int,
        secret: bytes,
    ) -> None:
        super().__init__(world, hosts, replace(victim.plan, decode=plan.host, copies=1, leaves_s=None))
        self.name = f"x{number}"
        self.is_forged = bool(plan.forgery)
        self._victim, self._replay, self._secret = victim, plan, secret
        self._has_any = False
        victim.told.append(self._take)

    @property
    def is_over(self) -> bool:
        """It has its answer, or nothing to ask with."""
        return super().is_over or (not self._has_any and self._victim.is_over)

    def _start(self) -> None:
        """Wait for what the other one is told."""

    def _take(self, params: Mapping[str, Any]) -> None:
        self._has_any = True
        if self._replay.forgery:
            token = forged(params[HANDLE_KEY], self._replay.forgery, self._secret, self._world.now)
            params = {**params, HANDLE_KEY: token}
        self._world.after(self._replay.after_s, lambda: self._decode(params))


def forged(token: str, how: str, secret: bytes, now: float) -> str:
    """A handle that is of no use, made of one that is: see ``FORGERIES``.

    ``now`` is in seconds of the clock by which handles expire.
    """
    ours = Handles(secret)
    if how == "changed":
        place = len(token) // 2
        return token[:place] + ("A" if token[place] != "A" else "B") + token[place + 1 :]
    claims = ours.read(token, even_expired=True)
    if how == "expired":
        return ours.make(msgspec.structs.replace(claims, expires_at=now - _LONG_AGO_S))
    return Handles(b"" if secret and how == "of another kind" else _OTHER_SECRET).make(claims)
