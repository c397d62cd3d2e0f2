"""vLLM resets caches: when the workers look at their weights, and that they do so before anything else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvconnect.plan.blocks import GroupBlocks
from kvconnect.transfer.orders import Hold, Load, OffloadOrders, Orders, Seek
from kvconnect.vllm.metadata import OrdersMetadata
from kvconnect.vllm.weights import LoadedWeights
from tests.vllm_contract import test_scheduler_hooks as hooks_kit

EMPTY, BUSY = (SimpleNamespace(total_num_scheduled_tokens=count, preempted_req_ids=None) for count in (0, 3))
LOAD = Orders(loads=(Load("r", "h", ("P", "x", 1), 4, (GroupBlocks(0, 0, (1,)),)),))
HOLD = Orders(holds=(Hold("r", "h", 4, (), 0),))
SEEK = Orders(offload=OffloadOrders(seeks=(Seek(1, "store", 0, (b"x",)),)))
CLEAR = Orders(offload=OffloadOrders(clear=True))


def connector(**attributes):
    made = hooks_kit.connector(engine="nixl")
    made.__dict__ |= attributes
    return made


class Half:
    transfer = offload = None
    due: ClassVar[dict[str, int]] = {}

    def __init__(self):
        self.resets, self.orders = 0, Orders()

    def reset(self):
        self.resets += 1

    def build_orders(self):
        return self.orders


def scheduler():
    half = Half()
    return connector(_scheduler=half, _role=KVConnectorRole.SCHEDULER), half


@pytest.mark.parametrize(
    ("step", "orders", "checks"),
    [
        (EMPTY, Orders(), False),
        (EMPTY, CLEAR, False),
        (BUSY, Orders(), True),
        (EMPTY, LOAD, True),
        (EMPTY, HOLD, True),
        (EMPTY, SEEK, True),
    ],
)
def test_the_first_step_after_a_reset_that_does_anything_has_weights_checked(step, orders, checks):
    made, half = scheduler()
    half.orders = orders
    assert not made.build_connector_meta(step).check_weights
    assert made.reset_cache() is True
    assert half.resets == 1, "also where nothing is kept: what is held counts too"
    assert made.build_connector_meta(step).check_weights is checks
    half.orders = Orders()
    assert made.build_connector_meta(BUSY).check_weights is not checks
    assert not made.build_connector_meta(BUSY).check_weights


class Worker:
    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))


def looked_at(check):
    weights = LoadedWeights("files 1", [], lambda value: [value])
    weights.names, weights.check = {"tensors": "1"}, check
    return weights


@pytest.mark.parametrize("changed", [False, True])
def test_a_worker_looks_once_and_before_it_takes_the_orders(changed):
    worker = Worker()
    weights = looked_at(lambda: worker.told.append(("check",)) or changed)
    made = connector(_worker=worker, _weights=weights, _role=KVConnectorRole.WORKER)
    for checks in (True, False):
        metadata = OrdersMetadata(LOAD, check_weights=checks)
        made.handle_preemptions(metadata)
        made.bind_connector_metadata(metadata)
        made.start_load_kv(None)
    taken = [("before_step", LOAD), ("after_zeroing", LOAD)]
    replaced = [("replace_weights", {"tensors": "1"})] if changed else []
    assert worker.told == [("check",), *replaced, *taken, *taken]
