"""Clients and the router between them and the nodes, on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvconnect.transfer.params import HANDLE_KEY, HINTS_KEY, PEER_KEY, SOURCES_KEY
from tests.simulator.host import Host
from tests.simulator.request import Request
from tests.simulator.scenario import Hint, RequestPlan
from tests.simulator.world import World

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
        self._open: dict[str, tuple[Host, Request]] = {}
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
        if self.outcome:
            return
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

    def _forward(self, request: Request) -> None:
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

    def _answered(self, request: Request) -> None:
        self._answers.append(request.outcome)
        self.answered_by = tuple((request.answer or {}).get(SOURCES_KEY, ()))
        if len(self._answers) == self.plan.copies and not self.outcome:
            self.outcome = ",".join(self._answers)

    def _ask(
        self, host: Host, name: str, max_tokens: int, params: Mapping[str, Any] | None, then: Any
    ) -> None:
        def done(request: Request) -> None:
            self._open.pop(name, None)
            then(request)

        session = self.plan.session if host.plan.keeps is not None else None
        request = Request(
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
            cache_salt=self.plan.prompt.salt or None,
        )
        if session is not None and not session.in_params:
            request.kv_hints, request.session_id = session.envelope, session.session_id
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
