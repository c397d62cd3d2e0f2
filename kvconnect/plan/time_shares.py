"""How long each of several transfers had a link to itself: waiting for others is no cost of a path."""

from __future__ import annotations

from collections.abc import Collection, Hashable


class TimeShares:
    """The time of one link, divided equally among those who use it at a time.

    A transfer that waits for its turn uses nothing. The shares of all transfers together are the time in
    which the link was in use.
    """

    def __init__(self) -> None:
        self._users: frozenset[Hashable] = frozenset()
        self._since = 0.0
        self._seconds: dict[Hashable, float] = {}

    def change(self, users: Collection[Hashable], now: float) -> None:
        """From now on these use the link, and nobody else. To be called whenever that changes."""
        if self._users and now > self._since:
            share = (now - self._since) / len(self._users)
            for user in self._users:
                self._seconds[user] = self._seconds.get(user, 0.0) + share
        self._users = frozenset(users)
        self._since = now

    def take(self, user: Hashable) -> float:
        """The seconds of a transfer that is over, up to the last change. It is forgotten."""
        self._users -= {user}
        return self._seconds.pop(user, 0.0)

    def __len__(self) -> int:
        """Transfers that are remembered."""
        return len(self._seconds.keys() | self._users)
