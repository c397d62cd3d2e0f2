"""The scheduler half against a stack and ranks that know what every row and block should hold."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvconnect.errors import ConfigError
from kvconnect.offload.scheduler.host import JobKind
from kvconnect.offload.tier_events import TierEvents
from kvconnect.transfer.orders import CHANGES_AT_ONCE, OffloadReport, Results, TierChange
from kvconnect.transfer.stack import Computed, StateBlock, Step
from tests.offload.endless import Endless
from tests.offload.half_kit import Kind, Plain, Removed, Req, Stack, num_ready

FULL = (Kind(4),)
SLIDING = (Kind(4), Kind(2, window=7))
HYBRID = (Kind(4), Kind(8, is_state=True))
DRAFT = (Kind(4), Kind(4, is_draft=True), Kind(2, window=9, is_draft=True))
ALL = (Kind(4), Kind(2, window=11), Kind(8, is_state=True), Kind(4, is_draft=True))


class Kept(Endless):
    """What an endless cache would have: ``kept`` of windows and states at the ends only, ``dense`` of all."""

    def __init__(self, *given):
        super().__init__(*given)
        self.dense = set()

    def keep(self, request):
        tokens, hit = request.token_ids[:-1], sum(request.hits[0])
        ends = self.boundaries(request.num_prompt_tokens) | {max(self.boundaries(len(tokens)), default=0)}
        for group in self.groups:
            for position in range(len(tokens) // group.block_tokens - group.is_draft):
                if (position + 1) * group.block_tokens <= hit and not self.reads(group, position, hit):
                    # Neither restored nor computed, as of a hit at the end of a chunk nothing is.
                    continue
                key = self.key(group, position, tokens)
                self.dense.add(key)
                if any(self.reads(group, position, end) for end in ends):
                    self.kept.add(key)


@st.composite
def traffic(draw):
    """Kinds of groups, their alignment, and prompts that share beginnings."""
    align = draw(st.sampled_from([4, 8]))
    kinds = []
    for _ in range(draw(st.integers(1, 3))):
        what = draw(st.sampled_from(["whole", "whole", "window", "chunk", "state"]))
        tokens = align if what == "state" else draw(st.sampled_from([2, 4]))
        window = draw(st.integers(1, 20)) if what == "window" else None
        # A draft's block has left a window that is no wider than it before it has a name.
        is_draft = what != "state" and (window is None or window > tokens) and draw(st.integers(0, 3)) == 0
        chunk = draw(st.integers(1, 20)) if what == "chunk" else None
        # vLLM refuses a draft model beside local chunks.
        is_draft = is_draft and chunk is None
        kinds.append(Kind(tokens, window, what == "state", is_draft, chunk=chunk))
    prompts = []
    for serial in range(draw(st.integers(2, 5))):
        base = draw(st.sampled_from(prompts)) if prompts else []
        cut = draw(st.just(len(base)) | st.integers(0, len(base)))
        fresh = draw(st.integers(0, 25))
        prompt = base[:cut] + [10 * serial + n % 7 for n in range(fresh)]
        # At a boundary the last one is another for the same prompt than for a longer one.
        whole = len(prompt) // align * align if draw(st.booleans()) else len(prompt)
        prompts.append(prompt[:whole] or [1])
    return tuple(kinds), align, prompts


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    traffic(), st.sampled_from([0, 8, 20]), st.integers(1, 12), st.sampled_from([(), ("disk",), ("store",)])
)
@example(((Kind(2, None, False, chunk=12),), 4, [[*range(7), *range(6)], [0, 1, 2, 3, 10]]), 8, 1, ())
def test_hits_are_those_of_an_endless_cache(case, checkpoint, max_new, tiers):
    check_hits(*case, checkpoint, max_new, tiers)


def check_hits(kinds, align, prompts, checkpoint, max_new, tiers=()):
    """Each prompt twice, and turns that go on from an answer: no hit is less or more than it can be."""
    stack = Stack(
        kinds,
        align,
        num_blocks=400,
        local=False,
        tiers=tiers,
        lag=0.0,
        cancels=0.0,
        checkpoint_tokens=checkpoint,
        num_ranks=2,
    )
    endless = Kept(stack.half.host.requirements.groups, align, checkpoint)
    turns = [*prompts, *prompts]
    for serial, prompt in enumerate(turns):
        if serial == len(prompts) and tiers:
            # Only lower tiers are left.
            stack.half.host.index.clear()
        if serial % 3 == 2:
            # The next turn of a talk: the answer is part of the prompt.
            prompt = stack.done[-1].token_ids + [99] * (serial % 5)
        request = stack.add(f"r{serial}", prompt, max_new=max_new)
        stack.run(everything=True)
        hit = sum(request.hits[0])
        least, most = endless.hit(prompt), endless.hit(prompt, kept=endless.dense)
        assert least <= hit <= most, (least, hit, most)
        endless.keep(request)
    stack.check_idle()


@pytest.mark.parametrize("kinds", [SLIDING, HYBRID, ALL])
def test_what_two_prompts_share_is_there_for_the_third(kinds):
    stack = Stack(kinds, 8, num_blocks=400, local=False, lag=0.0, cancels=0.0, checkpoint_tokens=0)
    shared = list(range(40))
    hits = []
    for tail in range(3):
        request = stack.add(f"r{tail}", [*shared, *range(100 * tail + 100, 100 * tail + 160)])
        stack.run(everything=True)
        hits.append(sum(request.hits[0]))
    ahead = max((kind.tokens for kind in kinds if kind.is_draft), default=0)
    assert hits == [0, 0, (40 - ahead) // 8 * 8]


MIXES = {
    "full": FULL,
    "sliding": SLIDING,
    "chunked": (Kind(4), Kind(2, chunk=6)),
    "hybrid": HYBRID,
    "draft": DRAFT,
    # Its draft's blocks have left the window before they have a name.
    "narrow": (Kind(4), Kind(4, window=3, is_draft=True), Kind(8, window=2)),
    "all": ALL,
    "sizes": (Kind(8, row_bytes=128), Kind(2, window=5), Kind(8, is_state=True, row_bytes=256)),
}


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, go, share beginnings and lose blocks; ranks answer late, fail, or not at all."""

    @initialize(
        mix=st.sampled_from(sorted(MIXES)),
        tiers=st.sampled_from([(), ("disk",), ("store",), ("disk", "store")]),
        num_ranks=st.integers(1, 3),
        rows=st.sampled_from([30, 120, 2000]),
        seed=st.integers(0, 1000),
        settings_of=st.fixed_dictionaries(
            {
                "checkpoint_tokens": st.sampled_from([0, 16]),
                "wait_s": st.sampled_from([0.02, 2.0]),
                "decoded": st.booleans(),
                "local": st.booleans(),
                "budget": st.sampled_from([7, 16, 40]),
            }
        ),
    )
    def begin(self, mix, tiers, num_ranks, rows, seed, settings_of) -> None:
        kinds = MIXES[mix]
        drafts = 0 if any(kind.is_state for kind in kinds) else seed % 4
        self.stack = Stack(
            kinds,
            8,
            seed=seed,
            tiers=tiers,
            rows=rows,
            num_ranks=num_ranks,
            num_blocks=150,
            drafts=drafts,
            **settings_of,
        )
        self.prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]
        self.serial = 0

    @rule(which=st.integers(0, 50), cut=st.integers(0, 60), fresh=st.integers(0, 30), new=st.integers(1, 12))
    def add(self, which, cut, fresh, new) -> None:
        prompt = self.prompts[which % len(self.prompts)][:cut]
        self.serial += 1
        prompt = (prompt + [self.serial % 3] * (fresh % 4) + list(range(fresh)))[:70] or [1]
        self.prompts.append(prompt)
        name = f"r{self.serial % 5}"
        if name not in self.stack.requests and name not in self.stack.kept:
            self.stack.add(name, prompt, max_new=new)

    @rule(count=st.integers(1, 6))
    def step(self, count) -> None:
        for _ in range(count):
            self.stack.step()

    @precondition(lambda self: self.stack.requests)
    @rule(which=st.integers(0, 10))
    def abort(self, which) -> None:
        names = sorted(self.stack.requests)
        self.stack.abort(names[which % len(names)])

    @precondition(lambda self: self.stack.running)
    @rule()
    def preempt(self) -> None:
        self.stack._preempt(self.stack.running[-1])

    @rule()
    def forget_device_cache(self) -> None:
        self.stack.forget_device_cache()

    @rule()
    def clear(self) -> None:
        self.stack.half.reset()

    @rule(fail=st.sampled_from([0.0, 0.0, 0.2, 1.0]))
    def break_copies(self, fail) -> None:
        self.stack.ranks.fail = fail

    @rule(is_silent=st.booleans())
    def silence_a_rank(self, is_silent) -> None:
        self.stack.ranks.silent = {0} if is_silent else set()

    @rule(seconds=st.sampled_from([0.1, 5.0, 100.0]))
    def wait(self, seconds) -> None:
        self.stack.clock.now += seconds

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.ranks.silent, self.stack.ranks.fail = set(), 0.0
            self.stack.run()
            self.stack.check_idle()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def stack_of(kinds=FULL, align=8, **settings):
    values = {"num_blocks": 400, "local": False, "lag": 0.0, "cancels": 0.0, **settings}
    return Stack(kinds, align, **values)


def prefill(stack, name, tokens, **more):
    request = stack.add(name, tokens, **more)
    stack.run(everything=True)
    return request


def asking(stack, name, tokens):
    """A request whose hooks a test calls by itself."""
    request = stack.add(name, tokens)
    stack.waiting.remove(request)
    return request


def report(half, *changes, rank=0, cleared=0, **jobs):
    """A rank reports."""
    half.update_results(Results(offload=(OffloadReport(rank, cleared, **jobs, changes=changes),)))


def orders(stack):
    """The orders of a step in which nothing is computed, carried out in part by nobody."""
    stack.clock.now += 0.01
    return stack.half.build_orders()


def failures(stack):
    return Counter(stack.half.host.draft.failures)


def test_asking_again_looks_nothing_up():
    stack = stack_of()
    prefill(stack, "first", range(64))
    request = stack.add("again", range(64))
    assert stack.half.matched_tokens(request, 0) == (56, True)
    stack.half._lookup._host = None
    for _ in range(3):
        assert stack.half.matched_tokens(request, 0) == (56, True)


def test_no_hit_is_looked_for_again_once_something_was_stored_but_not_each_time():
    stack = stack_of()
    late = asking(stack, "late", range(64))
    assert stack.half.matched_tokens(late, 0) == (0, False)
    prefill_only = stack.add("first", range(64))
    stack.end(prefill_only)
    stack.settle()
    asked_at = stack.clock.now
    stack.half.matched_tokens(late, 0)
    stack.clock.now = asked_at + 1
    assert stack.half.matched_tokens(late, 0) == (56, True)


def test_a_longer_local_hit_is_taken_into_account():
    stack = stack_of(SLIDING)
    prefill(stack, "first", range(64))
    request = stack.add("again", range(64))
    assert stack.half.matched_tokens(request, 0) == (56, True)
    assert stack.half.matched_tokens(request, 16) == (40, True)
    assert stack.half.matched_tokens(request, 56) == (0, False)
    assert stack.half.matched_tokens(request, 0) == (56, True)


def test_one_prefix_of_two_requests_is_stored_once_and_fetched_once():
    stack = stack_of(tiers=("disk",))
    stack.add("a", range(64))
    stack.add("b", range(64))
    stored, fetched = [], []
    step_orders = stack.ranks.before_step

    def note(given):
        stored.extend(name for store in given.stores for name in store.hashes)
        fetched.extend(name for fetch in given.fetches for name in fetch.hashes)
        step_orders(given)

    stack.ranks.before_step = note
    stack.run(everything=True)
    assert len(stored) == len(set(stored)) == 16
    stack.half.host.index.clear()
    again = [stack.add("c", range(64)), stack.add("d", range(64))]
    stack.run(everything=True)
    assert [request.hits for request in again] == [[(0, 56)], [(0, 56)]]
    assert len(fetched) == len(set(fetched)) == 14
    stack.check_idle()


def test_a_restore_that_failed_is_computed_and_its_rows_are_dropped():
    stack = stack_of()
    prefill(stack, "first", range(64))
    stack.ranks.fail = 1.0
    request = stack.add("again", range(64))
    stack.until(lambda: request.hits)
    stack.until(lambda: not stack.loading)
    stack.ranks.fail = 0.0
    assert num_ready(stack.half.host.index, 0, request.hashes(4)) == 0
    assert stack.half.matched_tokens(request, 0) == (0, False)
    assert failures(stack)["offload_restore_failed"] == 1
    stack.run()
    # It was stored again meanwhile.
    assert prefill(stack, "third", range(64)).hits == [(0, 56)]
    stack.check_idle()


def test_what_a_tier_no_longer_has_is_a_shorter_hit():
    stack = stack_of(tiers=("disk",), num_ranks=2)
    prefill(stack, "first", range(64))
    stack.half.host.index.clear()
    request = stack.add("again", range(64))
    gone = request.hashes(4)[9]
    # Another rank has it still; nobody was told.
    del stack.ranks.lower[1]["disk"][0, gone]
    stack.run(everything=True)
    assert request.hits == [(0, 32)]
    assert failures(stack)["offload_fetch_missed"] == 1
    stack.check_idle()


@pytest.mark.parametrize("tiers", [("disk",), ("store",)])
def test_a_rank_that_never_answers_costs_wait_s_and_its_rows(tiers):
    stack = stack_of(tiers=tiers, num_ranks=2, wait_s=1.0)
    prefill(stack, "first", range(64))
    stack.half.host.index.clear()
    stack.ranks.silent = {1}
    request = stack.add("again", range(64))
    began = stack.clock.now
    stack.until(lambda: request.hits)
    assert request.hits == [(0, 0)]
    assert 0.9 < stack.clock.now - began < 1.3
    stack.end(request)
    # The next may wait for what this one stored, but nobody waits for the same a second time.
    for name, most_s in (("next", 1.3), ("third", 0.2)):
        began = stack.clock.now
        other = stack.add(name, range(64))
        stack.until(lambda hits=other.hits: hits)
        assert other.hits == [(0, 0)]
        assert stack.clock.now - began < most_s
    stack.until(lambda: not stack.requests)
    for _ in range(70):
        stack.clock.now += 1
        stack.step(everything=True)
    assert not stack.half.pending
    assert failures(stack)["offload_overdue"] >= 1
    pending = sum(counts.pending for counts in stack.half.host.index.counts().values())
    assert pending > 0 or tiers == ("store",)
    # It answers after all.
    stack.ranks.silent = set()
    stack.run(everything=True)
    stack.check_idle()


def test_reports_come_in_any_order_and_more_than_once():
    stack = stack_of(num_ranks=2, tiers=("disk",))
    request = asking(stack, "first", range(16))
    stack.half.matched_tokens(request, 0)
    ids = [[1, 2, 3, 4]]
    stack.half.update_after_alloc(request, ids, 0)
    stack.half.launched(Step((Computed("first", 16, ids),)))
    (store,) = orders(stack).stores
    lost = store.hashes[2]

    def report(*reports):
        stack.half.update_results(Results(offload=reports))

    report(OffloadReport(1, kept=(store.job,)), OffloadReport(5, done={store.job: ()}))
    report(OffloadReport(1, done={store.job: (lost,), 999: ()}))
    report(OffloadReport(1, done={store.job: store.hashes}, kept=(store.job,)))
    assert num_ready(stack.half.host.index, 0, store.hashes) == 0
    report(OffloadReport(0, done={store.job: ()}))
    assert num_ready(stack.half.host.index, 0, store.hashes) == 2
    counts = stack.half.host.index.counts()[0]
    assert (counts.ready, counts.pinned, counts.pending) == (3, 3, 1)
    report(OffloadReport(0, kept=(store.job,)))
    counts = stack.half.host.index.counts()[0]
    assert (counts.ready, counts.pinned, counts.pending) == (3, 0, 0)
    stack.half.request_finished(request, ids)
    # The one that failed is stored from the blocks that the request still had.
    assert [store.hashes for store in orders(stack).stores] == []
    assert failures(stack)["offload_unknown_rank"] == 1


@pytest.mark.parametrize("stage", ["gathered", "ordered", "promised", "fetching", "restoring", "waiting"])
def test_nothing_from_before_a_clear_is_found_after_it(stage):
    stack = stack_of(tiers=("disk",), lag=0.0)
    if stage in ("gathered", "ordered"):
        request = stack.add("first", range(64))
        while not len(stack.half._stores):
            stack.compute(stack.schedule())
            stack.hooks.tell()
        if stage == "ordered":
            stack.ranks.before_step(orders(stack))
    else:
        prefill(stack, "first", range(64))
        if stage == "fetching":
            stack.half.host.index.clear()
        request = stack.add("again", range(64))
        if stage == "restoring":
            stack.schedule()
            stack.ranks.start(orders(stack))
        elif stage != "waiting":
            answer = stack.half.matched_tokens(request, 0)
            assert answer == ((None, False) if stage == "fetching" else (56, True))
    stack.half.reset()
    given = orders(stack)
    assert given.clear
    stack.ranks.before_step(given)
    stack.ranks.start(given)
    if stage == "restoring":
        # Its rows stay until they arrived.
        assert stack.half.host.index.counts()[0].pinned == 14
    stack.run(everything=True)
    stack.check_idle()
    counts = stack.half.host.index.counts()[0]
    if stage in ("gathered", "ordered", "restoring"):
        assert counts.ready == 0
    else:
        assert request.hits[-1] == (0, 0)
    last = prefill(stack, "last", range(64))
    assert last.hits == [(0, 0 if stage in ("gathered", "ordered", "restoring") else 56)]


def test_short_rows_are_passed_over_and_counted():
    stack = stack_of(rows=16)
    prefill(stack, "first", range(64))
    request = asking(stack, "again", range(64))
    assert stack.half.matched_tokens(request, 0) == (56, True)
    other = stack.add("other", range(500, 600))
    stack.end(other)
    stack.settle()
    assert failures(stack)["offload_rows_short"] >= 1
    stack.waiting.append(request)
    stack.run(everything=True)
    assert request.hits == [(0, 56)]
    stack.check_idle()


def test_a_prompt_longer_than_the_memory_keeps_its_beginning():
    stack = stack_of(rows=10)
    for name in "abc":
        request = prefill(stack, name, range(100))
    assert request.hits == [(0, 40)]


def test_of_a_crowd_the_ends_of_prompts_make_room_first():
    stack = stack_of(rows=40)
    for serial in range(6):
        prefill(stack, f"r{serial}", range(1000 * serial, 1000 * serial + 64))
    hits = [
        sum(prefill(stack, f"again{serial}", range(1000 * serial, 1000 * serial + 64)).hits[0])
        for serial in (5, 4)
    ]
    assert hits == [56, 56]


@pytest.mark.parametrize(
    ("settings", "hit"), [({"decoded": True}, 80), ({"decoded": False}, 64), ({"min_tokens": 81}, 0)]
)
def test_settings_bound_what_is_kept_and_restored(settings, hit):
    for kinds in (FULL, SLIDING, HYBRID):
        stack = stack_of(kinds, checkpoint_tokens=0, **settings)
        first = prefill(stack, "first", range(70), max_new=17)
        assert first.num_tokens == 87
        assert sum(prefill(stack, "again", [*first.token_ids, 5]).hits[0]) == hit


@pytest.mark.parametrize("most", [0, 20, 10**9, -1, "7", 3.5, True])
def test_a_request_may_bound_what_is_kept_of_it(most):
    stack = stack_of()
    prefill(stack, "first", range(64), params={"max_offload_tokens": most})
    refused = not isinstance(most, int) or isinstance(most, bool) or most < 0
    hit = 56 if refused or most > 64 else most // 8 * 8
    assert sum(prefill(stack, "again", range(64)).hits[0]) == hit
    assert failures(stack)["offload_parameters_refused"] == refused


def test_requests_that_neither_read_nor_write():
    stack = stack_of()
    for reads, writes, hit in ((True, False, 0), (True, True, 0), (False, True, 0), (True, True, 56)):
        request = stack.add("r", range(64))
        stack.half.new_request(request, reads=reads, writes=writes)
        stack.run(everything=True)
        assert sum(request.hits[0]) == hit
    stack.check_idle()


def test_fewer_tokens_than_promised_are_restored_or_refused():
    for kinds, taken, refused in (
        (FULL, 30, False),
        (SLIDING, 30, True),
        (HYBRID, 30, True),
        (HYBRID, 8, True),
    ):
        stack = stack_of(kinds, checkpoint_tokens=0)
        prefill(stack, "first", range(64))
        request = asking(stack, "again", range(64))
        assert stack.half.matched_tokens(request, 0) == (56, True)
        ids = tuple(list(range(1, 1 + 64 // kind.tokens)) if not kind.is_state else [300] for kind in kinds)
        stack.half.update_after_alloc(request, ids, taken)
        (restore,) = orders(stack).restores
        assert bool(restore.refusal) is refused
        if not refused:
            assert restore.copies[0].block_ids == tuple(range(1, 9))
        stack.half.update_results(
            Results(received=("again",), failed={"again": restore.refusal} if refused else {})
        )
        stack.half.request_finished(request, ids)
        stack.settle()
        stack.check_idle()


def test_a_promise_that_is_not_taken_is_given_back():
    stack = stack_of(SLIDING)
    prefill(stack, "first", range(64))
    request = asking(stack, "again", range(64))
    assert stack.half.matched_tokens(request, 0) == (56, True)
    assert stack.half.offers("again")
    stack.half.update_after_alloc(request, ([1], [2]), 0)
    assert not stack.half.offers("again")
    assert not any(counts.pinned for counts in stack.half.host.index.counts().values())
    assert not orders(stack)


def test_a_stack_that_takes_what_was_never_promised_is_told_so():
    stack = stack_of()
    request = asking(stack, "r", range(64))
    stack.half.update_after_alloc(request, (list(range(1, 17)),), 8)
    (restore,) = orders(stack).restores
    assert "not what was promised" in restore.refusal
    assert stack.half.matched_tokens(request, 0) == (0, False)
    stack.half.update_results(Results(received=("r",), failed={"r": restore.refusal}))
    stack.half.request_finished(request, ([],))
    stack.check_idle()


def test_blocks_that_are_overwritten_early_are_not_stored():
    stack = stack_of()
    request = asking(stack, "r", range(16))
    ids = ([11, 12, 13, 14],)
    stack.half.update_after_alloc(request, ids, 0)
    stack.half.launched(Step((Computed("r", 16, ids),)))
    stack.half.overwritten({12, 99})
    (store,) = orders(stack).stores
    assert store.copies.block_ids == (11, 13, 14)
    assert stack.half.host.index.counts()[0].pending == 3


def test_what_is_overwritten_before_it_is_stored_is_not_waited_for():
    stack = stack_of()
    first, second = stack.add("r", range(16)), stack.add("s", range(17))
    ids = ([11, 12, 13, 14],)
    stack.half.update_after_alloc(first, ids, 0)
    stack.half.launched(Step((Computed("r", 16, ids),)))
    assert stack.half.matched_tokens(second, 0)[0] is None
    stack.half.overwritten(set(ids[0]))
    assert stack.half.matched_tokens(second, 0) == (0, False)


def test_a_state_at_a_boundary_of_the_stacks_own_choice_is_kept():
    stack = stack_of(HYBRID, checkpoint_tokens=0)
    request = asking(stack, "r", range(64))
    stack.half.update_after_alloc(request, ([1], [2]), 0)
    stack.half.launched(Step(states=(StateBlock("r", 1, 24, 7),)))
    stack.half.launched(Step(states=(StateBlock("r", 1, 25, 7, True),)))
    stack.half.launched(Step(states=(StateBlock("r", 0, 24, 7, True),)))
    stack.half.launched(Step(states=(StateBlock("r", 1, 24, 0, True),)))
    assert not orders(stack)
    stack.half.launched(Step(states=(StateBlock("r", 1, 24, 7, True),)))
    stack.half.launched(Step(states=(StateBlock("r", 1, 56, 8),)))
    (store,) = orders(stack).stores
    assert store.copies.block_ids == (7, 8)
    assert store.hashes == (request.hashes(8)[2], request.hashes(8)[6])


def test_hits_are_told_by_where_they_came_from():
    stack = stack_of(tiers=("disk",))
    prefill(stack, "first", range(64))
    names = stack.done[-1].hashes(4)
    stack.half.host.index.drop(0, names[8:])
    request = stack.add("again", range(64))
    stack.until(lambda: request.hits)
    assert stack.half.sources("again", 56) == {"disk": 24, "host": 32}
    assert stack.half.sources("again", 10) == {"disk": 10}
    stack.run()


def test_what_an_answer_left_behind_makes_room():
    stack = stack_of(HYBRID, checkpoint_tokens=0)
    prefill(stack, "first", range(30), max_new=60)
    states = stack.half.host.index.counts()[1]
    # After the prompt, and the last two of the answer.
    assert states.ready == 3
    stack = stack_of(SLIDING, checkpoint_tokens=0)
    prefill(stack, "first", range(30), max_new=60)
    assert stack.half.host.index.counts()[1].ready <= 3 + 3 + 4 + 4


@pytest.mark.parametrize("is_heard", [True, False])
def test_what_a_disk_gets_after_the_last_request_is_heard_without_another_one(is_heard):
    stack = stack_of(tiers=("disk",))
    if not is_heard:
        stack.half.host.events = None
        stack.hear = lambda: None
    stack.add("last", range(64))
    keep = stack.ranks._keep
    stack.ranks._keep = lambda rank, *job: stack.ranks.todo[rank].append(("keep", *job))
    for _ in range(20):
        stack.step(everything=True)
    assert not stack.requests
    assert stack.half.pending == is_heard, "vLLM steps while it is pending"
    stack.ranks._keep = keep
    stack.until(lambda: not stack.half.pending)
    assert bool(stack.half.host.lower.counts()) == is_heard
    stack.ranks.silent = {0}
    stack.add("never kept", range(1000, 1064))
    for _ in range(70):
        stack.clock.now += 1
        stack.step()
    assert not stack.half.pending, "an overdue job is not waited for"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_that_follow_one_another_share_an_event(tier):
    """Also where a disk has written them in another sequence, as far as nothing else is between them."""
    requests = [Req(name, list(range(first, first + 40)), 1, None) for name, first in (("a", 0), ("b", 500))]
    events, group = TierEvents(Plain()), stack_of().half.host.requirements.groups[0]
    names = [request.hashes(4) for request in requests]
    for request, own in zip(requests, names, strict=True):
        events.describe(group, [(request, own, 2, 9)], {*own} - {own[5]})
    order = [names[0][2:5], names[0][6:9], names[1][2:5]]
    given = [name for some in order for name in some]
    events.stored(tier, 0, given if tier == "host" else [given[at] for at in (4, 8, 2, 0, 6, 3, 5, 1, 7)])
    told = events.take()
    assert sorted(event.hashes for event in told) == sorted(order)
    for event in told:
        request = requests[event.tokens[0] >= 500]
        first = request.hashes(4).index(event.hashes[0])
        assert event.parent == request.hashes(4)[first - 1]
        assert event.tokens == request.token_ids[4 * first : 4 * first + 12]


def test_events_begin_with_what_the_disk_held_in_bounded_batches():
    """After a restart, when the disk has been looked through before anyone asks for events."""
    half = stack_of().half
    names = [number.to_bytes(8, "big") for number in range(5000)]
    for first in range(0, len(names), CHANGES_AT_ONCE):
        change = TierChange("disk", 0, added=tuple(names[first : first + CHANGES_AT_ONCE]))
        report(half, change)
    half.host.lower.drop("disk", 0, names[:1])
    announced = []
    for _ in range(3):
        (event,) = half.take_events()
        assert len(event.hashes) <= CHANGES_AT_ONCE
        assert event.tokens == (), "a router must not take them for a block without tokens"
        announced += event.hashes
        assert half.pending == (len(announced) < 4999), "vLLM steps as long as there is more"
    assert announced == names[1:]
    report(half, TierChange("disk", 0, removed=(names[1],)))
    assert half.take_events() == [Removed("disk", 0, [names[1]])]


def test_after_a_reset_nothing_of_before_is_announced():
    half = stack_of().half
    names = [number.to_bytes(8, "big") for number in range(5000)]
    report(half, TierChange("disk", 0, added=tuple(names[:9])))
    half.take_events()
    for first in range(9, len(names), CHANGES_AT_ONCE):
        change = TierChange("disk", 0, added=tuple(names[first : first + CHANGES_AT_ONCE]))
        report(half, change)
    assert half.take_events(), "more than one call takes"
    half.reset()
    events = [event for _ in range(3) for event in half.take_events()]
    assert all(isinstance(event, Removed) for event in events)
    gone = sorted(name for event in events for name in event.hashes)
    assert gone == names[: 9 + CHANGES_AT_ONCE], "what was announced is taken back, and nothing more is"


def test_what_was_reported_before_a_clear_and_comes_after_it_is_not_there():
    """With asynchronous scheduling a report is under way while all is cleared."""
    half = stack_of(tiers=("disk",)).half
    change = TierChange("disk", 0, added=(b"a",))
    half.reset()
    report(half, change)
    assert half.build_orders().clear
    report(half, change)
    assert half.host.lower.counts() == {}
    assert not half.take_events()
    report(half, change, cleared=1)
    assert half.host.lower.has("disk", 0, [b"a"]) == [True]


@pytest.mark.parametrize("last", [0, 1])
def test_what_one_rank_has_read_and_another_missed_is_taken_back_and_announced_anew(last):
    half = stack_of(num_ranks=2, tiers=("store",)).half
    there = (TierChange("store", 0, (b"a",)),)
    job = half.host.jobs.open(JobKind.FETCH, 0, half.host.index.reserve(0, [b"a"])[0], tier="store")
    read = OffloadReport(0, done={job.number: ()}, changes=there)
    missed = OffloadReport(1, done={job.number: (b"a",)}, changes=(TierChange("store", 0, (), (b"a",)),))
    half.update_results(Results(offload=(missed, read) if last == 0 else (read, missed)))
    assert not half.take_events()
    half.update_results(Results(offload=(OffloadReport(0, changes=there), OffloadReport(1, changes=there))))
    (event,) = half.take_events()
    assert (event.tier, event.hashes) == ("store", [b"a"])


def test_too_little_memory_for_one_hit_is_said():
    kinds = (Kind(4), Kind(4, window=64))
    with pytest.raises(ConfigError, match="cache group 1 .*, and the shortest hit needs 16 of them"):
        Stack(kinds, 4, rows=8)


def test_restores_that_keep_failing_are_left_alone_for_a_while():
    stack = stack_of()
    for serial in range(5):
        prefill(stack, f"r{serial}", range(100 * serial, 100 * serial + 64))
    stack.ranks.fail = 1.0
    hits = []
    for serial in range(4):
        request = stack.add("again", range(100 * serial, 100 * serial + 64))
        stack.run(everything=True)
        hits.append(sum(request.hits[0]))
    assert hits == [56, 56, 56, 0]
    stack.ranks.fail = 0.0
    stack.clock.now += 31
    assert prefill(stack, "last", range(400, 464)).hits == [(0, 56)]
    stack.check_idle()


def test_no_job_becomes_overdue_while_nothing_is_stepped():
    stack = stack_of()
    request = stack.add("r", range(64))
    stack.end(request)
    stack.clock.now += 3600
    stack.settle()
    assert not failures(stack)
    stack.check_idle()
