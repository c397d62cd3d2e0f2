"""Those who present a handle that somebody else was given: as it is, or forged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from kvconnect.peer.handles import Handles
from kvconnect.transfer.params import HANDLE_KEY
from tests.simulator.clients import Client
from tests.simulator.host import Host
from tests.simulator.scenario import ReplayPlan
from tests.simulator.world import World

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
