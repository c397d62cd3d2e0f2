"""Which requests of this node name the same handle, and which of them fetches what it stands for.

A handle is good for one fetch. A serving stack makes several requests of one where several answers are
wanted, and a router may send one twice: one of them loads, the others wait and then use the local
prefix cache. Pure bookkeeping: a share is forgotten with the last request that names it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvconnect.scheduler.params import RemotePrefill


class Turn(enum.Enum):
    """What a request may do about its handle now."""

    FETCH = "fetch"
    WAIT = "wait, another request fetches"
    COMPUTE = "compute, the handle is spent"


@dataclass(eq=False)
class Share:
    """A handle and the requests of this node that name it.

    ``undecided`` may still fetch; ``decided`` got their blocks, or fetch. ``starts`` is, of those that were
    offered the load, how many tokens each had. ``spent`` once a fetch was ordered, or P let go. ``loader`` is
    the request whose load is under way, ``cancelled`` whether that is ordered to end, and ``failure`` why it
    failed otherwise.
    """

    remote: RemotePrefill
    undecided: set[str] = field(default_factory=set)
    decided: set[str] = field(default_factory=set)
    starts: dict[str, int] = field(default_factory=dict)
    loader: str = ""
    spent: bool = False
    cancelled: bool = False
    failure: str = ""


class Shares:
    """All shares of a node. Handles that cannot be used are never shared, and never released."""

    def __init__(self) -> None:
        self._by_request: dict[str, Share] = {}
        self._by_handle: dict[str, Share] = {}
        self._loading: dict[str, Share] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    @property
    def num_loading(self) -> int:
        """Loads under way."""
        return len(self._loading)

    def of(self, request_id: str) -> Share | None:
        """The share that a request joined."""
        return self._by_request.get(request_id)

    def join(self, request_id: str, remote: RemotePrefill) -> Share:
        """A request names a handle. It joins once."""
        share = self._by_handle.get(remote.handle)
        if share is None:
            # What was made for another prompt is spent for this one, and its handle is left to that.
            share = Share(remote, spent=remote.is_of_other_prompt)
            if remote.handle:
                self._by_handle[remote.handle] = share
        share.undecided.add(request_id)
        self._by_request[request_id] = share
        return share

    def turn(self, request_id: str, share: Share) -> Turn:
        """What a request may do now. It stays so until one of them fetches or ends.

        After a failure every sibling is to order a load, which can only be refused: whether it is computed
        then is for the serving stack's policy to say.
        """
        if request_id in share.decided or (share.spent and not (share.loader or share.failure)):
            return Turn.COMPUTE
        return Turn.WAIT if share.loader else Turn.FETCH

    def fetch(self, request_id: str, share: Share) -> bool:
        """A request's load is ordered. False: the handle is spent, and the load can only be refused.

        That happens where two requests were told that they may fetch before either got its blocks.
        """
        is_first = not share.spent
        share.undecided.discard(request_id)
        share.decided.add(request_id)
        self._loading[request_id] = share
        if is_first:
            share.loader, share.spent = request_id, True
        return is_first

    def compute(self, request_id: str, share: Share) -> bool:
        """A request does without. True: none fetches any more, and P must let go."""
        share.undecided.discard(request_id)
        share.decided.add(request_id)
        return self._is_unwanted(share)

    def leave(self, request_id: str) -> Share | None:
        """A request ended. The share, if none fetches any more and P must let go."""
        share = self._by_request.pop(request_id, None)
        if share is None:
            return None
        share.undecided.discard(request_id)
        share.decided.discard(request_id)
        self._forget_if_over(share)
        return share if self._is_unwanted(share) else None

    def cancel(self, request_id: str) -> None:
        """A load that may be under way is ordered to end: that it fails then says nothing of the handle."""
        share = self._loading.get(request_id)
        if share is not None and share.loader == request_id:
            share.cancelled = True

    def loaded(self, request_id: str, failure: str = "") -> None:
        """A load is over; ``failure`` says why it failed, if it did."""
        share = self._loading.pop(request_id, None)
        if share is not None and share.loader == request_id:
            share.loader = ""
            if failure and not share.cancelled:
                share.failure = f"the request that fetched for this one failed: {failure}"
            self._forget_if_over(share)

    def is_loading(self, request_id: str) -> bool:
        """A request's load is under way."""
        return request_id in self._loading

    def _is_unwanted(self, share: Share) -> bool:
        if share.spent or share.undecided:
            return False
        share.spent = True
        return not share.remote.refusal

    def _forget_if_over(self, share: Share) -> None:
        if not (share.undecided or share.decided or share.loader):
            self._by_handle.pop(share.remote.handle, None)
