"""What vLLM's scheduler output says of requests that are sent while they run, as told to our half."""

from __future__ import annotations

import dataclasses
import logging
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Progress
from kvconnect.transfer.params import TRANSFER_KEY
from kvconnect.vllm.steps import Steps
from tests.halves.test_scheduler_half import Request, connector
from tests.halves.test_transfer_ids import ON_P
from tests.prefill.test_streams import arrived, finish, prefill_of

HANDLE = "transfer:t-1"


def output(new=(), running=(), resumed=(), preempted=(), counts=None):
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
    )


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
            self.half.update_after_alloc(Request(name, 40, ON_P), ([1],), 0)
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


def test_what_others_do_is_not_looked_at(prefill):
    told = Told(prefill)
    scheduled = output(new=[("x", 0, ([1],))], running=[("y", 5, ([2],))], counts={"x": 3, "y": 1})
    assert told(scheduled) == []
    assert told(output(preempted=["x"])) == []


def test_a_preempted_request_that_is_pulled_is_pulled_anew():
    """Nothing of it is sent or kept, so that no step of it is due."""
    half = connector("kv_consumer", sources=["10.0.0.9:5600"])
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


@pytest.mark.parametrize(
    "broken",
    [
        SimpleNamespace(),
        output(new=[("p", 0, ([7],))]),
        SimpleNamespace(preempted_req_ids=7),
    ],
)
def test_an_output_that_cannot_be_read_ends_nothing_but_this(prefill, broken, caplog):
    told = Told(prefill)
    told(output(new=[("p", 0, ([7],))], counts={"p": 16}))
    assert told(output()) == [progress(16, (0, (7,)))]
    with caplog.at_level(logging.WARNING):
        assert told(broken) == [HANDLE]
        assert told(broken) == []
    assert caplog.text.count("prompts are sent once they are computed") == 1
    assert told(output(running=[("p", 16, ([8],))], counts={"p": 16})) == []
    assert told(output()) == []


@given(st.integers(0, 2**32 - 1))
def test_what_is_told_was_launched_in_earlier_steps(seed):
    """Against the blocks and tokens that each request had when the step before was over."""
    rng = random.Random(seed)
    half, ids = prefill_of(), iter(range(1, 10**6))
    told, waiting, running, known = Told(half, *(f"p{n}" for n in range(4))), [], {}, {}
    for number in range(4):
        arrived(half, f"p{number}", rng.randint(32, 90), params={**ON_P, TRANSFER_KEY: str(number)})
        waiting.append(f"p{number}")
    half.build_orders()
    state: dict[str, list] = {}
    seen: set[str] = set()
    for _ in range(40):
        before = {name: (count, list(blocks)) for name, (count, blocks) in state.items()}
        lost = [name for name in running if rng.random() < 0.1]
        for name in lost:
            del running[name], state[name]
            before.pop(name)
            waiting.append(name)
        step = {"new": [], "running": [], "resumed": [], "preempted": lost, "counts": {}}
        for name in list(running):
            if rng.random() < 0.7:
                count = rng.randint(1, 20)
                new = [next(ids) for _ in range(-(-(state[name][0] + count) // 16) - len(state[name][1]))]
                step["running"].append((name, state[name][0], (new,) if new else None))
                step["counts"][name] = count
                state[name][0] += count
                state[name][1].extend(new)
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            hit, count = 16 * rng.randint(0, 1), rng.randint(1, 20)
            blocks = [next(ids) for _ in range(-(-(hit + count) // 16))]
            kind = rng.choice(["new", "resumed"]) if name in seen else "new"
            seen.add(name)
            step[kind].append((name, hit, (list(blocks),)))
            step["counts"][name] = count
            running[name] = True
            state[name] = [hit + count, blocks]
        for order in told(output(**step)):
            if isinstance(order, str):
                known.pop(order, None)
                continue
            record = known.setdefault(order.handle, [0, [], order.num_tokens])
            record[0] = order.computed_tokens
            for blocks in order.groups:
                assert blocks.first_block == len(record[1])
                record[1].extend(blocks.block_ids)
        for name, (count, blocks) in before.items():
            computed, told_blocks, num_tokens = known[f"transfer:{name[1:]}"]
            assert computed == min(count, num_tokens)
            assert told_blocks == blocks[: -(-num_tokens // 16)]


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
    told = Told(half)
    told(sched.SchedulerOutput.make_empty())
    assert not told.steps.refusal
