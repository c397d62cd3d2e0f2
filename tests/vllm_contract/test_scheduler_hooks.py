"""The scheduler half under the vLLM that is installed: its hooks in the order in which vLLM calls them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from kvconnect.addresses import RankAddress
from kvconnect.config import parse_kv_transfer_config
from kvconnect.errors import ConfigError
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.vllm import connector as module
from kvconnect.vllm.connector import KVConnect
from kvconnect.vllm.metadata import AddressMetadata, ReportMetadata
from kvconnect.vllm.plugin import follow_pauses
from kvconnect.vllm.spans import Spans
from kvconnect.vllm.steps import WAIT_S, Recovery, Steps
from tests.offload.half_kit import Kind, Stack

OWN = AddressMetadata(0, None, {0: 64})
KEPT, MOVED = (0,), (0, 1)
"""A cache of which one group is replayed after a hit, unless a peer sends it."""


def connector(half: SchedulerHalf | None = None, engine: str = "none") -> KVConnect:
    """Of both roles, without what it reads of vLLM's configuration."""
    made = object.__new__(KVConnect)
    made._config = parse_kv_transfer_config(
        {
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"engine": engine, "offload": {"cpu_bytes": 1 << 20}},
        }
    )
    made._vllm = SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=True), scheduler_config=SimpleNamespace()
    )
    made._workers, made._early, made._reasons = {}, {}, {}
    made._report, made._own, made._worker = ReportMetadata(), None, None
    made._scheduler, made._kept, made._spans = half, KEPT, Spans(float, int)
    made._cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace())], transfer_group_ids=MOVED
    )
    made._recovery = Recovery(expects=made._awaits_workers, clock=lambda: 0.0)
    made._steps = Steps(is_zeroed_first=False)
    made._was_reset, made._weights = False, None
    return made


def stored() -> Stack:
    """A stack that has kept 64 tokens."""
    stack = Stack((Kind(4),), 8, num_blocks=400, local=False, lag=0.0, cancels=0.0)
    stack.add("first", range(64))
    stack.run(everything=True)
    return stack


def arrived(stack: Stack, name: str) -> Any:
    request = stack.add(name, range(64))
    request.get_skip_reading_prefix_cache = lambda: False
    return request


def test_vllm_is_told_until_a_request_ends_that_its_restore_brought_no_replayed_group():
    """It asks before the blocks are given, and again once the load was reported, to replay the rest."""
    stack = stored()
    hooks = connector(SchedulerHalf(offload=stack.half))
    hooks._workers = {0: AddressMetadata(0, None, {0: 64})}
    request = stack.add("again", range(64))
    assert hooks.get_num_new_matched_tokens(request, 0) == (56, True)
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT
    hooks.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([*range(1, 17)],)), 56)
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT
    hooks.update_connector_output(KVConnectorOutput(finished_recving={"again"}))
    assert hooks.get_loaded_kv_cache_group_ids(request) == KEPT


class TheirMetadata(base.KVConnectorHandshakeMetadata):
    pass


class Theirs:
    """Another connector with a handshake, which bears no other's; NixlConnector is like this."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def get_handshake_metadata(self):
        return TheirMetadata()

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        if not all(isinstance(meta, TheirMetadata) for meta in metadata.values()):
            raise ValueError("expects its own")
        self.heard.append(metadata)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def build_connector_meta(self, scheduler_output):
        return base.KVConnectorMetadata()

    def build_connector_worker_meta(self):
        return None

    def has_pending_push_work(self):
        return False

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


class Worker:
    """A worker half that carries nothing out."""

    def before_step(self, orders) -> None:
        pass

    def after_zeroing(self, orders) -> None:
        pass


def beside(ours: KVConnect, theirs: Theirs, *, first: bool) -> MultiConnector:
    made = object.__new__(MultiConnector)
    made._connectors = [ours, theirs] if first else [theirs, ours]
    made._requests_to_connector, made._extra_async_saves = {}, {}
    made._connector_metadata = None
    return made


OUTPUT = SimpleNamespace(
    total_num_scheduled_tokens=0,
    preempted_req_ids=None,
    num_scheduled_tokens={},
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[], new_block_ids=[]),
    new_block_ids_to_zero=None,
)


def step(scheduler: MultiConnector, worker: MultiConnector) -> None:
    """One step of vLLM without tokens."""
    metadata = scheduler.build_connector_meta(OUTPUT)
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


@pytest.mark.parametrize("first", [True, False])
def test_offload_starts_beside_a_connector_with_a_handshake_in_either_order(monkeypatch, first):
    stack, made = stored(), []
    monkeypatch.setattr(
        module,
        "make_scheduler_half",
        lambda *given, **_: made.append(given[-1]) or SchedulerHalf(offload=stack.half),
    )
    ours, theirs = connector(), Theirs()
    ours._worker, ours._own = Worker(), OWN
    worker = beside(ours, Theirs(), first=first)
    monkeypatch.setattr(module.settings, "outermost", lambda ours: worker)
    ours = connector()
    scheduler = beside(ours, theirs, first=first)
    told = {(0, 0): worker.get_handshake_metadata()}
    scheduler.set_xfer_handshake_metadata_pp_aware(told)
    assert theirs.heard == [told]

    assert scheduler.has_pending_push_work(), "an idle vLLM steps until its workers have told"
    early, streamed = arrived(stack, "early"), arrived(stack, "streamed")
    streamed.resumable = True
    for request in (early, streamed):
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert not ours.reset_cache(), "it cannot be done before what is kept is known"
    step(scheduler, worker)
    assert scheduler.get_num_new_matched_tokens(early, 0) == (56, True)
    assert made == [{0: AddressMetadata(0, None, {0: 64})}]
    assert not stack.half._requests["streamed"].most_tokens, "what they are was remembered"
    assert not ours._early
    step(scheduler, worker)
    assert worker.build_connector_worker_meta() is None, "told once"


def test_requests_wait_for_a_bounded_time_for_what_workers_tell():
    stack, hooks = stored(), connector()
    clock = SimpleNamespace(now=0.0)
    hooks._recovery = Recovery(expects=True, clock=lambda: clock.now)
    request = arrived(stack, "early")
    hooks.on_new_request(request)
    assert hooks.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now = WAIT_S
    assert hooks.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not hooks.has_pending_push_work()
    hooks.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([1],)), 0)
    assert not hooks._early, "its blocks were not told from the first on: it stays unknown"


def test_alone_the_handshake_tells_what_the_workers_are():
    hooks = connector()
    assert hooks.get_handshake_metadata() is None
    hooks._own = OWN
    assert hooks.get_handshake_metadata() == OWN


def test_an_engine_beside_another_handshake_is_refused_with_what_is_accepted():
    hooks = connector(engine="nixl")
    hooks._own = AddressMetadata(0, RankAddress(0, "10.0.0.1", 5600))
    assert hooks.get_handshake_metadata().address is not None
    with pytest.raises(ConfigError, match=r"TheirMetadata.* engine is 'nixl'; accepted .*: engine 'none'"):
        hooks.set_xfer_handshake_metadata_pp_aware({(0, 0): TheirMetadata()})


@pytest.mark.parametrize("kind", ["ours", "several", "another's", "none"])
def test_the_pause_in_which_vllm_waits_is_reported_and_no_other(kind):
    """vLLM has no hook of it."""
    follow_pauses()
    follow_pauses()
    informed: list[tuple[str, bool]] = []

    def informs(name):
        return SimpleNamespace(_paused=lambda *, is_paused: informed.append((name, is_paused)))

    scheduler = Scheduler.__new__(Scheduler)
    several = SimpleNamespace(_connectors=[informs("a"), object(), informs("b")])
    made = {"ours": informs("a"), "several": several, "another's": object(), "none": None}
    scheduler.connector = made[kind]
    names = {"ours": ["a"], "several": ["a", "b"]}.get(kind, [])
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, PauseState.UNPAUSED):
        scheduler.set_pause_state(state)
        assert scheduler.pause_state is state
        assert informed == [(name, state is PauseState.PAUSED_NEW) for name in names]
        informed.clear()
