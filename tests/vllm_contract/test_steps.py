"""What vLLM's scheduler output says of requests, as told to our half, and how long an idle vLLM steps.

That what is told lies in memory is for ``tests.vllm_bench``, which has vLLM's own scheduler: it drafts,
rejects, preempts, resets, and plans a step before it knows what the last one sampled.
"""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest

from kvconnect.offload.disk.row_files import RowFiles
from kvconnect.transfer.orders import OffloadReport, TierChange
from kvconnect.transfer.stack import StateBlock
from kvconnect.vllm.steps import WAIT_S, Recovery, Steps
from tests.call_count import calls_of
from tests.offload.disk_kit import open_driver, open_tier
from tests.offload.tier_suite import some_rows
from tests.offload.worker_kit import Rig


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


def state_steps(*names, state):
    """The steps of these requests, a half that is told of them, and the states that are handed off."""
    steps, told = Steps(is_zeroed_first=False), []
    for name in names:
        steps.begin(
            SimpleNamespace(request_id=name, num_prompt_tokens=8, num_tokens=8, num_computed_tokens=8)
        )
    half = SimpleNamespace(due=dict.fromkeys(names, 1 << 62), launched=lambda step: told.extend(step.states))
    return steps, half, told, SimpleNamespace(boundary_state_offloads=state)


def test_a_state_is_told_with_the_next_step_or_at_the_end():
    offers = {"r": [(STATE_GROUP, 77, 8), (STATE_GROUP, 0, 4)]}
    steps, half, told, state = state_steps("r", state=offers)
    step = output(new=[("r", 0, ([1, 2], [77]))], counts={"r": 8}, kv_connector_block_state=state)
    steps.tell(half, step)
    assert not told, "the step that fills it has not run"
    steps.end(half, "r")
    assert told == [StateBlock("r", STATE_GROUP, 8, 77, True)], "the null block holds no state"


def test_a_state_whose_block_went_to_another_request_in_the_same_step_is_not_told():
    offers = {"r": [(STATE_GROUP, 24, 8)], "kept": [(STATE_GROUP, 30, 8)]}
    steps, half, told, state = state_steps("r", "other", "kept", state=offers)
    step = output(
        new=[("other", 0, ([5], [24]))],
        running=[("r", 9, None), ("kept", 4, ([6], [30]))],
        counts={"r": 1, "other": 4, "kept": 4},
        kv_connector_block_state=state,
    )
    steps.tell(half, step)
    steps.tell(half, _decoding(0))
    assert [(one.request_id, one.block_id) for one in told] == [("kept", 30)]


BLOCKS = ([7], [])


def _decoding(count, with_blocks=()):
    names = [f"r{number}" for number in range(count)]
    return output(
        running=[(name, 1000, BLOCKS if name in with_blocks else None) for name in names],
        counts=dict.fromkeys(names, 1),
        new_block_ids_to_zero=[3, 4],
        kv_cache_block_copies=[SimpleNamespace(src_block_id=1, dst_block_id=9)],
    )


class Told:
    """A half that notes what it is told. ``due`` are all requests, from so many tokens on."""

    def __init__(self, due=5000):
        self.calls = []
        self.due = {f"r{number}": due for number in range(256)}

    def launched(self, step):
        self.calls += step.computed

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
    filled, half = _running(256), Told()
    for _ in range(3):
        filled.tell(half, _decoding(256, with_blocks={"r17"}))
    assert half.calls == [("r17", 1001, BLOCKS)] * 2


@pytest.mark.parametrize("is_last", [False, True])
def test_of_tokens_of_a_draft_only_those_are_told_that_were_accepted(is_last):
    """Two of them, of the step that is told or of the last one, which no further step follows."""
    filled, half = _running(2), Told()
    step = _decoding(2, with_blocks={"r0"})
    step.num_scheduled_tokens = {"r0": 5, "r1": 5}
    filled.tell(half, step)
    for request in filled._requests.values():
        request.num_tokens, request.num_computed_tokens = 1004, 1005
    if is_last:
        filled.end(half, "r0")
        filled.end(half, "r1")
        assert half.calls == [("r0", 1003, BLOCKS), ("r0", 1003, None)], "of the other no block is known"
        assert not filled._requests
    else:
        filled.tell(half, _decoding(2))
        assert half.calls == [("r0", 1003, BLOCKS)]


def test_a_request_that_is_due_is_told_without_new_blocks():
    filled, half = _running(3), Told()
    half.due |= {"r1": 1001, "r2": 1002}
    for _ in range(2):
        filled.tell(half, _decoding(3))
    assert half.calls == [("r1", 1001, None)]


def test_a_request_that_is_admitted_anew_is_told_nothing_of_the_blocks_that_it_lost():
    """It was preempted and admitted within one step: its table is a new one."""
    filled, half = _running(2), Told()
    filled.tell(half, _decoding(2, with_blocks={"r0", "r1"}))
    filled.admitted("r0")
    step = _decoding(1)
    step.preempted_req_ids = {"r0"}
    filled.tell(half, step)
    assert half.calls == [("r1", 1001, BLOCKS), ("preempted", "r0")]


def test_a_preempted_request_that_ends_is_told_no_more():
    filled, half = _running(1), Told()
    filled.tell(half, _decoding(1, with_blocks={"r0"}))
    filled.tell(half, output(preempted=["r0"]))
    filled._requests["r0"].num_computed_tokens = 0
    filled.end(half, "r0")
    assert half.calls == [("r0", 1001, BLOCKS), ("preempted", "r0")]


def test_a_step_costs_one_call_for_each_request_that_got_no_block():
    costs = {}
    for count in (16, 256):
        filled, half = _running(count), Told()
        steps = [_decoding(count, with_blocks={f"r{at}", f"r{at + 1}"}) for at in range(9)]
        costs[count] = max(calls_of(filled.tell, half, step) for step in steps)
    assert costs[256] - costs[16] <= 256 - 16


def test_what_a_worker_overwrites_before_its_orders_is_told():
    filled, half = _running(2, is_zeroed_first=True), Told()
    filled.tell(half, _decoding(2))
    assert half.calls == [("overwritten", {3, 4, 9})]


@pytest.mark.parametrize("copies", [None, []])
def test_a_step_that_overwrites_nothing_is_not_told(copies):
    filled, half = _running(1, is_zeroed_first=True), Told()
    step = _decoding(1)
    step.new_block_ids_to_zero, step.kv_cache_block_copies = None, copies
    filled.tell(half, step)
    assert not half.calls


def tell(steps, half, scheduled):
    """What a half is told when a step is scheduled."""
    half.calls.clear()
    steps.tell(half, scheduled)
    return [*half.calls]


def test_a_step_is_told_with_the_next_one():
    steps, half = _running(1), Told(due=0)
    assert tell(steps, half, output(new=[("r0", 16, ([7, 8],))], counts={"r0": 10})) == []
    told = tell(steps, half, output(running=[("r0", 26, None)], counts={"r0": 4}))
    assert told == [("r0", 26, ([7, 8],))]
    told = tell(steps, half, output(running=[("r0", 30, ([9],))], counts={"r0": 10}))
    assert told == [("r0", 30, None)]
    assert tell(steps, half, output()) == [("r0", 40, ([9],))], "also if it is not scheduled any more"
    assert tell(steps, half, output()) == []


def test_a_request_of_which_no_step_is_due_is_preempted_too():
    """As one that is pulled, of which nothing is sent or kept."""
    steps, half = _running(1), Told()
    half.due = {}
    assert tell(steps, half, output(new=[("r0", 0, ([7],))], counts={"r0": 16})) == []
    assert tell(steps, half, output(preempted=["r0"])) == [("preempted", "r0")]


@pytest.mark.parametrize("resumed_as", ["new", "resumed"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_preempted_request_begins_anew(resumed_as, at_once):
    """The second model runner is told of resumed requests as of new ones."""
    steps, half = _running(1), Told(due=0)
    tell(steps, half, output(new=[("r0", 0, ([7],))], counts={"r0": 16}))
    again = {resumed_as: [("r0", 0, ([4, 5],))], "counts": {"r0": 20}}
    lost = [("r0", 16, ([7],)), ("preempted", "r0")]
    if at_once:
        assert tell(steps, half, output(preempted=["r0"], **again)) == lost
    else:
        assert tell(steps, half, output(preempted=["r0"])) == lost
        assert tell(steps, half, output()) == tell(steps, half, output(**again)) == []
    assert tell(steps, half, output()) == [("r0", 20, ([4, 5],))]


def test_a_request_that_ended_is_not_mixed_up_with_another_of_its_name():
    steps, half = _running(1), Told(due=0)
    tell(steps, half, output(new=[("r0", 0, ([7],))], counts={"r0": 16}))
    (request,) = steps._requests.values()
    request.num_computed_tokens = 16
    steps.end(half, "r0")
    steps.begin(request)
    assert tell(steps, half, output()) == []


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
    assert tell(_running(1), Told(), sched.SchedulerOutput.make_empty()) == []


# The reports that workers begin with

NEWS = TierChange("disk", 0, (b"h",))


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_it_steps_while_more_is_told_and_then_no_more():
    recovery = Recovery(expects=True, clock=Clock())
    for _ in range(3):
        assert recovery.is_under_way
        recovery.reported([OffloadReport(0), OffloadReport(1, changes=(NEWS,), is_recovering=True)])
    assert recovery.is_under_way
    recovery.reported([OffloadReport(1, changes=(NEWS,))])
    assert not recovery.is_under_way


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
    recovery.reported([OffloadReport(0), OffloadReport(1, is_recovering=True)])
    assert recovery.is_under_way
    clock.now += 0.2
    assert not recovery.is_under_way
    clock.now -= 1.0
    assert not recovery.is_under_way


def test_a_disk_that_can_be_opened_only_later_is_waited_for_as_long():
    clock = Clock()
    recovery = Recovery(expects=True, clock=clock)
    assert recovery.is_under_way
    recovery.reported([OffloadReport(0)])
    clock.now += 10 * WAIT_S
    recovery.reported([OffloadReport(0, is_recovering=True)])
    assert recovery.is_under_way


def test_without_lower_tiers_it_waits_for_nothing():
    assert not Recovery(expects=False, clock=Clock()).is_under_way
