"""What vLLM's scheduler output says of requests, as told to our half, and how long an idle vLLM steps.

First every request against a small scheduler that keeps every token's KV by its block. It drafts, rejects,
preempts, ends requests at any time, and may plan a step before it knows what the last one sampled.
"""

from __future__ import annotations

import dataclasses
import random
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.cache.specs import div_ceil
from kvconnect.offload.disk.row_files import RowFiles
from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import OffloadReport, Progress, TierChange
from kvconnect.vllm.steps import WAIT_S, Recovery, Steps
from tests.call_count import calls_of
from tests.halves import test_scheduler_half as halves
from tests.halves.test_transfer_ids import ON_P
from tests.offload.disk_kit import open_driver, open_tier
from tests.offload.tier_suite import some_rows
from tests.offload.worker_kit import Rig
from tests.prefill.test_streams import arrived, finish, prefill_of


def output(new=(), running=(), resumed=(), preempted=(), counts=None, **more):
    """One step: new requests as (id, computed, blocks), running and resumed ones the same."""
    cached = [*running, *resumed]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, block_ids=blocks)
            for name, computed, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[computed for _, computed, _ in cached],
            new_block_ids=[blocks for _, _, blocks in cached],
            resumed_req_ids={name for name, _, _ in resumed},
        ),
        num_scheduled_tokens=counts or {},
        preempted_req_ids=set(preempted),
        **more,
    )


STATE_GROUP = 1
NEVER = 1 << 62


class Request:
    """A request as vLLM has it, and the truth about it: token ``t`` of it is ``(id, t)``."""

    def __init__(self, request_id, num_prompt, num_output):
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt
        self.num_tokens = num_prompt
        self.ends_at = num_prompt + num_output
        self.computed = 0
        self.blocks: list[int] = []
        self.is_known = False
        # Tokens that were sampled, but that the scheduler has not heard of.
        self.unheard = 0

    @property
    def num_computed_tokens(self):
        return self.computed


class Half:
    """Follows what is told, and looks at the memory each time."""

    def __init__(self, memory, block_tokens):
        self.memory, self.block_tokens = memory, block_tokens
        self.tables: dict[str, list[int]] = {}
        self.certain: dict[str, int] = {}
        self.known: set[str] = set()
        self.states: list[tuple] = []
        self.gone: list = []

    @property
    def due(self):
        tokens = self.block_tokens
        due = {name: (certain // tokens + 1) * tokens for name, certain in self.certain.items()}
        return {**dict.fromkeys(self.known, 0), **due}

    def launched(self, step):
        for request_id, group, num_tokens, block_id, is_chosen in step.states:
            assert is_chosen
            self.states.append((request_id, group, num_tokens, block_id))
        for computed in step.computed:
            self.computed(*computed)

    def computed(self, request_id, num_computed_tokens, new_block_ids):
        if new_block_ids is not None:
            self.tables.setdefault(request_id, []).extend(new_block_ids[0])
        table = self.tables[request_id]
        assert num_computed_tokens >= self.certain.get(request_id, 0)
        self.certain[request_id] = num_computed_tokens
        for token in range(num_computed_tokens // self.block_tokens * self.block_tokens):
            block, slot = divmod(token, self.block_tokens)
            assert self.memory[table[block]][slot] == (request_id, token)

    def preempted(self, request_id):
        self.tables.pop(request_id, None)
        self.certain.pop(request_id, None)

    def overwritten(self, block_ids):
        self.gone.append(set(block_ids))


class Scheduler:
    """Plans steps, carries them out in memory, and tells ``Steps`` of them."""

    def __init__(self, block_tokens, drafts, *, ahead):
        self.block_tokens, self.drafts, self.ahead = block_tokens, drafts, ahead
        self.memory: dict[int, dict[int, tuple]] = {}
        self.half = Half(self.memory, block_tokens)
        self.filled = Steps(is_zeroed_first=False)
        self.running: dict[str, Request] = {}
        self.ended: dict[str, tuple[Request, list[int]]] = {}
        self.late: list = []

    def begin(self, request):
        self.running[request.request_id] = request
        self.half.known.add(request.request_id)
        self.filled.begin(request)

    def step(self, chosen, preempted, chunk, rng):
        new, cached, counts = [], [], {}
        lost = [self.running[name] for name in preempted if self.running[name].is_known]
        for request in lost:
            self._learn(request)
            request.computed, request.blocks, request.resumes = 0, [], True
        lost_names = {request.request_id for request in lost}
        plans = []
        for name in chosen:
            request = self.running[name]
            if name in lost_names:
                continue
            known = request.num_tokens + request.unheard
            count = min(chunk, known - request.computed)
            guesses = self.drafts if count == 1 and known == request.computed + 1 else 0
            counts[name] = count + guesses
            blocks = div_ceil(request.computed + count + guesses + self.drafts, self.block_tokens)
            fresh = [len(self.memory) + 1 + at for at in range(blocks - len(request.blocks))]
            for block in fresh:
                self.memory[block] = {}
            anew = not request.is_known or getattr(request, "resumes", False)
            entry = (request, request.computed, ([*fresh], [5]) if fresh else None, anew)
            (cached if request.is_known else new).append(entry)
            request.blocks += fresh
            plans.append((request, count, guesses))
        planned = output(
            new=[(r.request_id, c, ids) for r, c, ids, _ in new],
            running=[(r.request_id, c, ids) for r, c, ids, anew in cached if not anew],
            resumed=[(r.request_id, c, ids) for r, c, ids, anew in cached if anew],
            preempted=lost_names,
            counts=counts,
        )
        self.filled.tell(self.half, planned)
        if self.ahead:
            # What the step before this one sampled.
            self._hear()
        for request, count, guesses in plans:
            request.is_known, request.resumes = True, False
            self._run(request, count, guesses, rng)
        if not self.ahead:
            self._hear()

    def _run(self, request, count, guesses, rng):
        start = request.computed
        accepted = rng.randint(0, guesses)
        for token in range(start, start + count + guesses):
            right = token < start + count + accepted
            content = (request.request_id, token) if right else ("guess", token)
            self.memory[request.blocks[token // self.block_tokens]][token % self.block_tokens] = content
        request.computed = start + count + accepted
        if request.computed >= request.num_tokens + request.unheard:
            request.unheard += 1 + accepted

    def _learn(self, request):
        request.num_tokens += request.unheard
        request.unheard = 0

    def _hear(self):
        """What was sampled is known now, and some requests end of it."""
        for request in list(self.running.values()):
            self._learn(request)
            if request.num_tokens >= request.ends_at:
                self.end(request.request_id)

    def end(self, name):
        request = self.running.pop(name)
        self.filled.end(self.half, name)
        self.half.known.discard(name)
        self.ended[name] = (request, self.half.tables.get(name, []))


@given(
    seed=st.integers(0, 10**6), block_tokens=st.integers(1, 6), drafts=st.integers(0, 4), ahead=st.booleans()
)
def test_what_is_told_lies_in_memory_and_nothing_is_left_out(seed, block_tokens, drafts, ahead):
    rng = random.Random(seed)
    scheduler = Scheduler(block_tokens, drafts, ahead=ahead)
    for number in range(3):
        scheduler.begin(Request(f"r{number}", rng.randint(1, 20), rng.randint(1, 25)))
    for _ in range(60):
        names = list(scheduler.running)
        chosen = [name for name in names if rng.random() < 0.8]
        preempted = [name for name in names if rng.random() < 0.05]
        scheduler.step(chosen, preempted, rng.randint(1, 9), rng)
        if scheduler.running and rng.random() < 0.02:
            scheduler.end(rng.choice(list(scheduler.running)))
    for name in list(scheduler.running):
        scheduler.end(name)
    for name, (request, table) in scheduler.ended.items():
        told = scheduler.half.certain.get(name, 0) // block_tokens
        whole = min(request.computed, max(request.num_prompt_tokens, request.num_tokens - 1)) // block_tokens
        if request.blocks:
            assert told == whole, "a block that is full at the end was told"
            assert table[:whole] == request.blocks[:whole]
    assert not scheduler.filled._requests


def test_a_state_is_told_with_the_next_step_or_at_the_end():
    scheduler = Scheduler(4, 0, ahead=False)
    request = Request("r", 8, 5)
    scheduler.begin(request)
    state = SimpleNamespace(boundary_state_offloads={"r": [(STATE_GROUP, 77, 8), (STATE_GROUP, 0, 4)]})
    step = output(new=[("r", 0, ([1, 2], [77]))], counts={"r": 8}, kv_connector_block_state=state)
    scheduler.memory.update({1: {i: ("r", i) for i in range(4)}, 2: {i: ("r", 4 + i) for i in range(4)}})
    scheduler.filled.tell(scheduler.half, step)
    assert not scheduler.half.states, "the step that fills it has not run"
    request.computed = 8
    scheduler.filled.end(scheduler.half, "r")
    assert scheduler.half.states == [("r", STATE_GROUP, 8, 77)], "the null block holds no state"


def test_a_state_whose_block_went_to_another_request_in_the_same_step_is_not_told():
    scheduler = Scheduler(4, 0, ahead=False)
    for name in ("r", "other", "kept"):
        scheduler.begin(Request(name, 8, 5))
    offers = {"r": [(STATE_GROUP, 24, 8)], "kept": [(STATE_GROUP, 30, 8)]}
    step = output(
        new=[("other", 0, ([5], [24]))],
        running=[("r", 9, None), ("kept", 4, ([6], [30]))],
        counts={"r": 1, "other": 4, "kept": 4},
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers),
    )
    half = SimpleNamespace(due=dict.fromkeys(("r", "other", "kept"), NEVER), told=[])
    half.launched = lambda step: half.told.extend((state[0], state[3]) for state in step.states)
    scheduler.filled.tell(half, step)
    scheduler.filled.tell(half, _decoding(0))
    assert half.told == [("kept", 30)]


def _decoding(count, with_blocks=()):
    names = [f"r{number}" for number in range(count)]
    return output(
        running=[(name, 1000, ([7], []) if name in with_blocks else None) for name in names],
        counts=dict.fromkeys(names, 1),
        new_block_ids_to_zero=[3, 4],
        kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=9)],
    )


class Silent:
    def __init__(self):
        self.calls = []
        self.due = {f"r{number}": 5000 for number in range(256)}

    def launched(self, step):
        self.calls += [(request_id, num_tokens) for request_id, num_tokens, _ in step.computed]

    def preempted(self, request_id):
        self.calls.append(("preempted", request_id))

    def overwritten(self, block_ids):
        self.calls.append(("overwritten", set(block_ids)))


def _running(count, *, is_zeroed_first=False):
    filled = Steps(is_zeroed_first=is_zeroed_first)
    for number in range(count):
        filled.begin(SimpleNamespace(request_id=f"r{number}", num_prompt_tokens=500, num_tokens=1002))
    return filled


def test_of_requests_that_got_no_block_nothing_is_told():
    filled, half = _running(256), Silent()
    for _ in range(3):
        filled.tell(half, _decoding(256, with_blocks={"r17"}))
    assert half.calls == [("r17", 1001)] * 2


def test_a_request_that_is_due_is_told_without_new_blocks():
    filled, half = _running(3), Silent()
    half.due |= {"r1": 1001, "r2": 1002}
    for _ in range(2):
        filled.tell(half, _decoding(3))
    assert half.calls == [("r1", 1001)]


def test_a_request_that_is_admitted_anew_is_told_nothing_of_the_blocks_that_it_lost():
    """It was preempted and admitted within one step: its table is a new one."""
    filled, half = _running(2), Silent()
    filled.tell(half, _decoding(2, with_blocks={"r0", "r1"}))
    filled.admitted("r0")
    step = _decoding(1)
    step.preempted_req_ids = {"r0"}
    filled.tell(half, step)
    assert half.calls == [("r1", 1001), ("preempted", "r0")]


def test_a_step_costs_one_call_for_each_request_that_got_no_block():
    costs = {}
    for count in (16, 256):
        filled, half = _running(count), Silent()
        steps = [_decoding(count, with_blocks={f"r{at}", f"r{at + 1}"}) for at in range(9)]
        costs[count] = max(calls_of(filled.tell, half, step) for step in steps)
    assert costs[256] - costs[16] <= 256 - 16


def test_what_a_worker_overwrites_before_its_orders_is_told():
    filled, half = _running(2, is_zeroed_first=True), Silent()
    filled.tell(half, _decoding(2))
    assert half.calls == [("overwritten", {3, 4, 9})]


@pytest.mark.parametrize("copies", [None, []])
def test_a_step_that_overwrites_nothing_is_not_told(copies):
    filled, half = _running(1, is_zeroed_first=True), Silent()
    step = _decoding(1)
    step.new_block_ids_to_zero, step.kv_cache_block_copies = None, copies
    filled.tell(half, step)
    assert not half.calls


# Requests that are sent while they run

HANDLE = "transfer:t-1"


@pytest.fixture
def prefill():
    made = prefill_of()
    arrived(made)
    made.build_orders()
    return made


class Told:
    """The orders of each step in turn."""

    def __init__(self, half, *names):
        self.half, self.steps = half, Steps(is_zeroed_first=False)
        for name in names or ("p", "x", "y"):
            self.steps.begin(
                SimpleNamespace(
                    request_id=name, num_prompt_tokens=100, num_tokens=100, num_computed_tokens=16
                )
            )

    def __call__(self, scheduled, admitted=()):
        for name in admitted:
            self.steps.admitted(name)
            self.half.update_after_alloc(halves.Request(name, 40, ON_P), ([1],), 0)
        self.steps.tell(self.half, scheduled)
        orders = self.half.build_orders()
        return [*orders.preempted, *orders.progress]


def progress(computed, *blocks):
    return Progress(HANDLE, 40, computed, tuple(GroupBlocks(0, first, ids) for first, ids in blocks))


def test_a_step_is_told_with_the_next_one(prefill):
    told = Told(prefill)
    assert told(output(new=[("p", 16, ([7, 8],))], counts={"p": 10})) == []
    assert told(output(running=[("p", 26, None)], counts={"p": 4})) == [progress(26, (0, (7, 8)))]
    assert told(output(running=[("p", 30, ([9],))], counts={"p": 10})) == [progress(30)]
    assert told(output()) == [progress(40, (2, (9,)))], "also if it is not scheduled any more"
    assert told(output(running=[("p", 40, ([10],))], counts={"p": 1})) == []
    assert told(output()) == []


def test_a_preempted_request_that_is_pulled_is_pulled_anew():
    """Nothing of it is sent or kept, so that no step of it is due."""
    half = halves.connector("kv_consumer", sources=["10.0.0.9:5600"])
    told, lost = Told(half, "p"), []
    half.preempted = lost.append
    assert not half.due
    told(output(new=[("p", 0, ([7],))], counts={"p": 16}))
    told(output(preempted=["p"]))
    assert lost == ["p"]


@pytest.mark.parametrize("resumed_as", ["new", "resumed"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_preempted_request_begins_anew(prefill, resumed_as, at_once):
    """The second model runner is told of resumed requests as of new ones."""
    told = Told(prefill)
    told(output(new=[("p", 0, ([7],))], counts={"p": 16}))
    assert told(output(running=[("p", 16, ([8],))], counts={"p": 16})) == [progress(16, (0, (7,)))]
    again = {resumed_as: [("p", 0, ([4, 5],))], "counts": {"p": 20}}
    if at_once:
        assert told(output(preempted=["p"], **again)) == [HANDLE]
    else:
        assert told(output(preempted=["p"])) == [HANDLE]
        assert told(output()) == []
        assert told(output(**again)) == []
    assert told(output(running=[("p", 20, None)], counts={"p": 1})) == [progress(20, (0, (4, 5)))]


@pytest.mark.parametrize("resumed_as", ["new", "resumed"])
def test_a_request_that_is_admitted_again_was_preempted_even_if_no_output_has_it(prefill, resumed_as):
    told = Told(prefill)
    told(output(new=[("p", 0, ([7],))], counts={"p": 16}))
    told(output())
    assert told(output(**{resumed_as: [("p", 0, ([4, 5],))], "counts": {"p": 20}}), ["p"]) == [HANDLE]
    assert told(output()) == [progress(20, (0, (4, 5)))]


def test_a_request_that_ended_is_not_mixed_up_with_another_of_its_name(prefill):
    told = Told(prefill)
    told(output(new=[("p", 0, ([7],))], counts={"p": 16}))
    told.steps.end(prefill, "p")
    finish(prefill, arrived(prefill), ([7],), delivered=False)
    arrived(prefill)
    assert told(output()) == []


def test_the_vllm_that_is_installed_has_what_is_read():
    sched = pytest.importorskip("vllm.v1.core.sched.output")
    fields = {
        sched.NewRequestData: {"req_id", "num_computed_tokens", "block_ids"},
        sched.CachedRequestData: {"req_ids", "num_computed_tokens", "new_block_ids", "resumed_req_ids"},
        sched.SchedulerOutput: {
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "preempted_req_ids",
        },
    }
    for cls, read in fields.items():
        assert read <= {field.name for field in dataclasses.fields(cls)}
    half = prefill_of()
    arrived(half)
    half.build_orders()
    assert Told(half)(sched.SchedulerOutput.make_empty()) == []


# The reports that workers begin with

NEWS = [OffloadReport(0), OffloadReport(1, changes=(TierChange("disk", 0, (b"h",)),))]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_it_steps_while_more_is_told_and_then_no_more():
    recovery = Recovery(expects=True, clock=Clock())
    for _ in range(3):
        assert recovery.is_under_way
        recovery.step()
        recovery.reported(NEWS)
    assert recovery.is_under_way
    recovery.step()
    assert not recovery.is_under_way, "a step that brought nothing is the last"
    recovery.step()
    recovery.reported(NEWS)
    assert recovery.is_under_way, "what changes later is heard in the same way"


def test_it_steps_until_a_disk_that_is_slower_than_steps_has_reported_all(tmp_path, monkeypatch):
    rows = some_rows(700, 1, length=9)
    before = open_driver(tmp_path)
    assert before.write(rows) == ()
    before.tier.close()
    monkeypatch.setattr(RowFiles, "read_footer", lambda *_: time.sleep(2e-4) or b"f")
    rig = Rig(open_tier(tmp_path, reads_footers=True))
    recovery = Recovery(expects=True, clock=time.monotonic)
    found = set()
    while recovery.is_under_way:
        recovery.step()
        reports = rig.worker.results().offload
        recovery.reported(reports)
        found.update(name for report in reports for change in report.changes for name in change.added)
        time.sleep(1e-3)
    rig.worker.close()
    assert found == {name for _, name in rows}


def test_where_nothing_is_told_it_waits_for_a_while():
    clock = Clock()
    recovery = Recovery(expects=True, clock=clock)
    assert recovery.is_under_way
    clock.now += WAIT_S - 0.1
    recovery.step()
    recovery.reported([OffloadReport(0), OffloadReport(1, is_recovering=True)])
    assert recovery.is_under_way
    clock.now += 0.2
    assert not recovery.is_under_way
    clock.now -= 1.0
    assert not recovery.is_under_way


def test_without_lower_tiers_it_waits_for_nothing():
    assert not Recovery(expects=False, clock=Clock()).is_under_way
