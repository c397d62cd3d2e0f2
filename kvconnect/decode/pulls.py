"""Pulls: requests whose KV this node (D) looks up at sources by name, until their load ends.

No handle of P and no lease exists before the pull: a source may evict the KV between lookup and fetch. A
failed pull therefore counts as a miss, and D computes the request. Pure bookkeeping, empty when idle.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvconnect.cache.identity import MAX_NAMES, Naming, Prefix
from kvconnect.cache.specs import KVCacheGroup
from kvconnect.config import TransferConfig
from kvconnect.decode.sources import SLOW_REST_S, Address, PrefillRate, Sources, is_worth_it
from kvconnect.errors import PeerError
from kvconnect.outcome import Cause
from kvconnect.peer.handles import PeerTrust
from kvconnect.peer.messages import PIN_PREFIX
from kvconnect.plan.blocks import BlockIdsByGroup
from kvconnect.timeline import Moment
from kvconnect.transfer.orders import Find, Found, Load, OrdersDraft, Results, blocks_of
from kvconnect.transfer.params import read_sources, transfer_params
from kvconnect.transfer.stack import RequestView, StackTraits

logger = logging.getLogger(__name__)

LOADED, MISSED, NOT_WORTH_IT = "loaded", "missed", "not_worth_it"
UNANSWERED, UNMEASURED, FAILED, ABORTED = "unanswered", "unmeasured", "failed", "aborted"
_REST_WAITS = 10
"""A source that did not answer within ``find_s`` is not asked for this many times ``find_s``."""


@dataclass(eq=False)
class _Pull:
    """A request that may be pulled; ``left`` are the sources not asked yet, ``asked`` is the one asked last.

    ``prefix``: the prefix looked up there; it must answer by ``deadline``; ``found``: its answer, of which
    ``num_tokens`` are loaded under ``handle`` since ``began_at``. ``computed``, ``local``: tokens computed,
    and restorable on D, at the time of the lookup. ``waits_until``: end of the wait for another request that
    pulls the same. ``asks_until``: after that no further source is asked. ``outcome``: counted if nothing is
    loaded; empty if no source was asked. ``tier``: the source's slowest that has some of what was found.
    ``is_over``: no lookup follows until the request begins anew.
    """

    sources: tuple[Address, ...]
    left: list[Address] = field(default_factory=list)
    asked: Address | None = None
    prefix: Prefix | None = None
    names: dict[int, Sequence[bytes]] = field(default_factory=dict)
    deadline: float = 0.0
    waits_until: float = 0.0
    asks_until: float = math.inf
    found: Found | None = None
    computed: int = 0
    local: int = 0
    handle: str = ""
    num_tokens: int = 0
    began_at: float = 0.0
    outcome: str = ""
    tier: str = ""
    is_over: bool = False

    def begin(self) -> None:
        """Start over: no source was asked yet."""
        self.left, self.outcome, self.is_over = list(self.sources), "", False
        self.waits_until, self.asks_until = 0.0, math.inf
        # Names of the tokens at that time: after a preemption the request has more tokens.
        self.names.clear()

    @property
    def key(self) -> bytes:
        """The first name that is looked up: the same for all requests of one prompt."""
        assert self.prefix is not None
        return self.prefix.names[self.prefix.start_tokens // self.prefix.naming.tokens]


class PullRequests:
    """All pulls of a node. ``stack`` states how names are made, and has a clock."""

    def __init__(
        self,
        config: TransferConfig,
        groups: Sequence[KVCacheGroup],
        stack: StackTraits,
        trust: PeerTrust | None,
        new_handle: Callable[[], str],
        draft: OrdersDraft,
    ) -> None:
        assert stack.naming is not None
        assert stack.clock is not None
        self._naming: Naming = stack.naming
        self._clock = stack.clock
        self._find_s, self._groups, self._stack = config.extra.find_s, groups, stack
        self._trust, self._new_handle, self._draft = trust, new_handle, draft
        own = draft.directory[0]
        self._sources = Sources(config.extra.sources, (own.host, own.port))
        self._rate = PrefillRate()
        self.has_sources = bool(self._sources.configured)
        self.requests: dict[str, _Pull] = {}
        """Requests that may be pulled. If this and ``loading`` are empty, no hook has work."""
        self.loading: dict[str, _Pull] = {}
        """Those whose load is under way, also once their request has ended."""
        # By first name: the request that looks it up or loads it.
        self._under_way: dict[bytes, str] = {}
        # Requests being computed: their tokens, the tokens at hand, and since when.
        self._computing: dict[str, tuple[RequestView, int, int, float]] = {}

    def new_request(self, request: RequestView) -> None:
        """Register a request whose KV may be pulled."""
        params = transfer_params(request)
        if params.get("do_remote_prefill"):
            return
        try:
            named = [address for address in read_sources(params) if self._is_trusted(address)]
        except PeerError as error:
            self._draft.warn("parameters_refused", "%s; its KV is asked of no peer", error)
            named = []
        if sources := self._sources.chosen(named):
            self.requests[request.request_id] = pull = _Pull(sources)
            pull.begin()

    def matched_tokens(self, request: RequestView, num_computed_tokens: int, local_tokens: int) -> int | None:
        """Tokens that a source keeps beyond those computed, if loading them beats ``local_tokens``.

        None: ask again, a lookup is under way. The answer is the same until the request is admitted.
        """
        pull = self.requests.get(request.request_id)
        if pull is None or pull.is_over:
            return 0
        now, request_id = self._clock(), request.request_id
        if pull.found is None and pull.prefix is not None:
            if now < pull.deadline:
                return None
            self._unanswered(request_id, pull, f"it did not answer within {self._find_s} s", now)
            pull.left.clear()
        if pull.found is not None:
            count = pull.found.num_tokens - num_computed_tokens
            if self._pays(count, local_tokens, pull.found.seconds):
                pull.computed, pull.local = num_computed_tokens, local_tokens
                return count
            is_measured = math.isfinite(pull.found.seconds)
            self._drop(request_id, pull, NOT_WORTH_IT if is_measured else UNMEASURED)
        if self._ask(request, pull, num_computed_tokens, local_tokens, now):
            return None
        self._give_up(request_id, pull)
        return 0

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockIdsByGroup, num_external_tokens: int
    ) -> None:
        """A request got blocks: order the load of the first ``num_external_tokens`` offered tokens."""
        request_id, now = request.request_id, self._clock()
        pull = self.requests.get(request_id)
        if pull is None or pull.found is None or num_external_tokens <= 0:
            if pull is not None:
                self._give_up(request_id, pull)
                # A stack admits a loaded request a second time, when it continues.
                if not (num_external_tokens or pull.local or pull.outcome == LOADED):
                    self._computing[request_id] = request, request.num_tokens, pull.computed, now
            return
        assert pull.asked is not None
        assert pull.prefix is not None
        first, handle = pull.computed, PIN_PREFIX + self._new_handle()
        end, tokens = first + num_external_tokens, pull.prefix.naming.tokens
        offered = pull.found.num_tokens
        refusal = None
        if end != offered:
            refusal = Cause.BLOCKS(f"blocks were given for {end} of {offered} tokens")
        prefix = Prefix(pull.prefix.naming, first // tokens * tokens, pull.prefix.names)
        groups = blocks_of(self._groups, block_ids, first, end)
        self._draft.loads.append(
            Load(request_id, handle, ("", *pull.asked), end, groups, refusal, prefix=prefix)
        )
        self._draft.note(Moment.LOAD_ORDERED, handle, request_id, num_external_tokens)
        pull.handle, pull.num_tokens, pull.began_at = handle, num_external_tokens, now
        pull.outcome, pull.is_over, self.loading[request_id] = LOADED, True, pull

    def preempted(self, request_id: str) -> None:
        """A request lost its blocks and begins anew: it may be pulled, unless a pull of it has failed."""
        self._computing.pop(request_id, None)
        pull = self.requests.get(request_id)
        if pull is not None and pull.outcome != FAILED:
            pull.begin()

    def request_finished(self, request_id: str) -> bool:
        """A request ended. Returns whether its load is under way, which is then ordered to end."""
        self._measure(request_id, self._clock())
        self._computing.pop(request_id, None)
        pull = self.requests.pop(request_id, None)
        if pull is not None:
            self._give_up(request_id, pull, ABORTED)
        if request_id in self.loading:
            self._draft.aborted.append(request_id)
        return request_id in self.loading

    def ordered(self) -> None:
        """Before the draft is taken: measure the prompts that were computed."""
        now = self._clock() if self._computing else 0.0
        for request_id in list(self._computing):
            self._measure(request_id, now)

    def reset(self) -> None:
        """The caches were reset: drop all lookups, whose KV may be of other weights."""
        for request_id, pull in self.requests.items():
            self._give_up(request_id, pull, ABORTED)

    def update_results(self, results: Results) -> None:
        """Take the workers' results: answers to lookups, and ended loads."""
        now = self._clock() if results.found or self.loading else 0.0
        for found in results.found:
            pull = self.requests.get(found.request_id)
            if pull is not None and pull.prefix is not None and pull.found is None:
                self._answered(found, pull, now)
        for request_id in results.received if self.loading else ():
            pull = self.loading.pop(request_id, None)
            if pull is not None:
                self._loaded(request_id, pull, request_id not in results.failed, now)

    def tier_of(self, request_id: str) -> str:
        """The source's slowest tier that has some of what a request loads by name; empty without a pull."""
        return self.loading[request_id].tier if request_id in self.loading else ""

    def state(self) -> dict[str, int]:
        """Counts of the pulls kept here. All zero when idle."""
        return {"pulling": len(self.loading), "pulls": len(self.requests) + len(self._under_way)}

    def _is_trusted(self, address: Address) -> bool:
        if address in self._sources.configured or self._trust is None:
            return True
        refusal = self._trust.refusal(*address, vouched=False)
        if refusal:
            self._draft.failures.append("peer_not_trusted")
        return refusal is None

    def _most_tokens(self, request: RequestView) -> int:
        """The most tokens to load: D computes the last token in any case."""
        return request.num_tokens - max(1, self._stack.held_back)

    def _pays(self, count: int, local_tokens: int, load_s: float) -> bool:
        return is_worth_it(count - local_tokens, local_tokens, load_s, self._rate.tokens_per_s)

    def _better(self, found: Found, pull: _Pull) -> Found:
        """A source's tokens in host memory or, if that saves more, with those on its disk."""
        gain = found.disk_tokens - found.num_tokens
        is_enough = self._pays(found.num_tokens - pull.computed, pull.local, found.seconds)
        pull.tier = "host"
        if gain <= 0 or (is_enough and not self._pays(gain, 0, found.disk_s - found.seconds)):
            return found
        pull.tier = "disk"
        return replace(found, num_tokens=found.disk_tokens, seconds=found.disk_s)

    def _ask(self, request: RequestView, pull: _Pull, computed: int, local: int, now: float) -> bool:
        """Ask the next source that may have the prefix. Whether there is one, or another request asks it."""
        pull.computed, pull.local = computed, local
        most = self._most_tokens(request)
        while pull.left and now < pull.asks_until and self._pays(most - computed, local, 0.0):
            source = pull.left[0]
            prefix = self._prefix(request, pull, source, computed)
            if prefix is not None and not self._sources.is_resting(source, now):
                name = prefix.names[prefix.start_tokens // prefix.naming.tokens]
                if self._waits_for_other(request.request_id, pull, name, now):
                    return True
                if not self._sources.lacks(source, name, now):
                    pull.left.pop(0)
                    pull.asked, pull.prefix, pull.found = source, prefix, None
                    pull.deadline = now + self._find_s
                    pull.asks_until = min(pull.asks_until, now + 2 * self._find_s)
                    self._under_way.setdefault(name, request.request_id)
                    self._draft.finds.append(Find(request.request_id, ("", *source), prefix, most))
                    return True
            pull.left.pop(0)
        return False

    def _prefix(self, request: RequestView, pull: _Pull, source: Address, num_computed: int) -> Prefix | None:
        """The prefix to look up at a source; None if it has no name, or none that the source can know."""
        naming = self._sources.naming(source, self._naming)
        if naming is None or self._stack.names is None:
            return None
        # Cached: a waiting request is looked at in every step, and naming 100 000 tokens takes 10 ms.
        if (names := pull.names.get(naming.tokens)) is None:
            names = pull.names[naming.tokens] = self._stack.names(request, naming.tokens)
        start = num_computed // naming.tokens
        if not start < min(len(names), MAX_NAMES) or (start + 1) * naming.tokens > self._most_tokens(request):
            return None
        return Prefix(naming, start * naming.tokens, tuple(names[:MAX_NAMES]))

    def _waits_for_other(self, request_id: str, pull: _Pull, name: bytes, now: float) -> bool:
        """Whether to wait for another request that pulls the same KV, soon in the device's prefix cache."""
        if self._under_way.get(name, request_id) == request_id:
            return False
        pull.waits_until = pull.waits_until or now + self._find_s
        return now < pull.waits_until

    def _answered(self, found: Found, pull: _Pull, now: float) -> None:
        source, prefix = pull.asked, pull.prefix
        assert source is not None
        assert prefix is not None
        if found.naming is not None and found.naming != prefix.naming:
            self._sources.names_by(source, found.naming)
            self._drop(found.request_id, pull, MISSED)
            if found.naming.hashing != self._naming.hashing:
                self._draft.warn(
                    "other_names",
                    "%s:%d names KV by %s and this node by %s, so neither finds what the other has: set the "
                    "same --prefix-caching-hash-algo and PYTHONHASHSEED",
                    *source,
                    found.naming.hashing,
                    self._naming.hashing,
                )
            else:
                # Ask again, with names of the source's own length.
                pull.left.insert(0, source)
        elif found.is_busy:
            # The source answers others, so it need not rest.
            self._drop(found.request_id, pull, UNANSWERED)
        elif found.error:
            self._unanswered(found.request_id, pull, str(found.error), now)
        elif max(found.num_tokens, found.disk_tokens) <= prefix.start_tokens:
            self._sources.miss(source, pull.key, now)
            self._drop(found.request_id, pull, MISSED)
        else:
            pull.found = self._better(found, pull)

    def _unanswered(self, request_id: str, pull: _Pull, reason: str, now: float) -> None:
        assert pull.asked is not None
        rest_s = _REST_WAITS * self._find_s
        logger.info("%s:%d is asked for no KV by name for %g s: %s", *pull.asked, rest_s, reason)
        self._sources.rest(pull.asked, now + rest_s)
        self._drop(request_id, pull, UNANSWERED)

    def _loaded(self, request_id: str, pull: _Pull, ok: bool, now: float) -> None:
        source, key, num_tokens, rate = pull.asked, pull.key, pull.num_tokens, self._rate.tokens_per_s
        assert source is not None
        self._leave(request_id, key)
        pull.prefix = pull.found = None
        self._draft.note(Moment.LOADED, pull.handle, request_id, ok)
        if self.requests.get(request_id) is not pull:
            self._count(request_id, ABORTED)
        elif not ok:
            pull.outcome = FAILED
            self._sources.miss(source, key, now)
            self._count(request_id, FAILED)
        else:
            self._count(request_id, LOADED, num_tokens)
            saved_s = (num_tokens - pull.local) / rate - (now - pull.began_at) if rate else 0.0
            if rate and self._sources.loaded(source, saved_s, now):
                logger.info(
                    "%s:%d is asked for no KV by name for %g s: to load %d tokens took longer than computing",
                    *source,
                    SLOW_REST_S,
                    num_tokens,
                )

    def _drop(self, request_id: str, pull: _Pull, outcome: str) -> None:
        """Drop a lookup or its answer, with its outcome."""
        if pull.prefix is not None:
            self._leave(request_id, pull.key)
            pull.outcome = outcome
        pull.prefix = pull.found = None

    def _give_up(self, request_id: str, pull: _Pull, outcome: str = NOT_WORTH_IT) -> None:
        """End a request's lookups, unless it begins anew, and count the outcome, of a last one this."""
        if pull.is_over:
            return
        self._drop(request_id, pull, outcome)
        if pull.outcome:
            self._count(request_id, pull.outcome)
        pull.is_over = True

    def _leave(self, request_id: str, key: bytes) -> None:
        if self._under_way.get(key) == request_id:
            del self._under_way[key]

    def _count(self, request_id: str, outcome: str, num_tokens: int = 0) -> None:
        self._draft.pulls.append((outcome, num_tokens))
        self._draft.note(f"{Moment.PULL}{outcome}", "", request_id, num_tokens)

    def _measure(self, request_id: str, now: float) -> None:
        """Measure the prefill rate by a computed prompt, once its next token is there."""
        request, num_tokens, at_hand, began_at = self._computing.get(request_id, (None, 0, 0, 0.0))
        if request is not None and request.num_tokens > num_tokens:
            del self._computing[request_id]
            self._rate.measured(num_tokens - at_hand, now - began_at)
