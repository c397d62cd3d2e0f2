"""One vLLM engine without its model: scheduler, connector halves and runner, stepped by hand."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from kvconnect.transfer.parts import DeviceSteps
from kvconnect.vllm.connector import KVConnect
from tests.vllm_bench.links import Links
from tests.vllm_bench.model import Caches, Model
from tests.vllm_bench.reference import Text, continuation
from tests.vllm_bench.router import Router
from tests.vllm_bench.runner import Runner
from tests.vllm_bench.settings import EngineSettings, vllm_config

_MOST_DELAY_STEPS = 4
_AT_REST_S = 10.0

# One rank, without a process group.
_ALONE = SimpleNamespace(rank_in_group=0, world_size=1)
parallel_state._TP = parallel_state._PP = parallel_state._PCP = _ALONE
init_none_hash(sha256)
# So that events name blocks by hashes that can be extended.
os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"


class Device:
    """Kernels in the order in which they were launched.

    One that is late has run a step's when its results are needed, and not before; others run each at once.
    """

    def __init__(self, *, is_late: bool) -> None:
        self._is_late = is_late
        self._pending: deque[tuple[Callable[[], None], bool]] = deque()
        self.launched = 0
        """How many kernels it was given so far."""
        self._ran = 0

    def launch(self, kernel: Callable[[], None], *, is_long: bool = True) -> None:
        """Give it a kernel. What is not long is over as soon as all before it is."""
        self._pending.append((kernel, is_long))
        self.launched += 1
        self.run(self._ran if self._is_late else self.launched)

    def run(self, number: int) -> None:
        """The first so many kernels have run after this."""
        while self._pending and (self._ran < number or not self._pending[0][1]):
            self._pending.popleft()[0]()
            self._ran += 1

    def record(self) -> Callable[[], bool]:
        """What says whether everything that was launched so far has run."""
        number = self.launched
        return lambda: self._ran >= number


class _NoGrammar:
    """Structured output of an engine that has none."""

    def accept_tokens(self, request: Request, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, request: Request, tokens: list[int]) -> list[int]:
        return tokens


class Engine:
    """One server. Its worker lives as long as it does; ``begin`` gives it a new scheduler.

    Args:
        links: what is known of transfers between this engine and others: which of them are about to end.
        fields: of the model's configuration, which differ from those of other engines.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        *,
        role: str,
        capacity: int,
        layout: str,
        extra: dict[str, Any],
        links: Links,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.model, self.role, self._links = name, model, role, links
        self._given = role, name, extra, model, fields or {}
        self.caches = Caches(model, capacity, layout)
        config = vllm_config(EngineSettings(num_blocks=capacity), *self._given)
        self.worker = KVConnect(config, KVConnectorRole.WORKER, model.config(capacity, 0))
        self.worker.register_kv_caches(self.caches.tensors)
        self.steps = 0

    def begin(self, settings: EngineSettings, rng: random.Random) -> None:
        """A new scheduler, runner and request table, over the same memory and worker."""
        self.settings, self._rng = settings, rng
        config = vllm_config(settings, *self._given)
        cache = self.model.config(settings.num_blocks, settings.num_drafts)
        block_size, hash_size = resolve_kv_cache_block_sizes(cache, config)
        cache.hash_block_size = hash_size
        make = AsyncScheduler if settings.is_async else Scheduler
        self.scheduler = make(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=_NoGrammar(),
            block_size=block_size,
            hash_block_size=hash_size,
            log_stats=False,
        )
        self.router = self.scheduler.kv_event_publisher = Router(cache, hash_size)
        connector = self.scheduler.connector
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        self.half = connector._half
        self.runner = Runner(self.caches, settings.num_drafts, rng)
        self._hash_tokens = hash_size
        self._named: dict[bytes, tuple[Text, int]] = {}
        self._hasher = get_request_block_hasher(hash_size, sha256)
        self._in_flight: deque[tuple[Any, ModelRunnerOutput, int]] = deque()
        self._device = Device(is_late=settings.is_late)
        self._device_steps = DeviceSteps(self._device.record)
        if (transfer := self.worker._worker.transfer) is not None:
            transfer._steps = self._device_steps
        self._raw: set[tuple[str, str]] = set()
        self._failed: set[str] = set()
        self._due: dict[tuple[str, str], int] = {}
        self._reports: deque[Any] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[str, dict[str, Any] | None]] = {}
        """By request why it ended, and its parameters for the next node."""

    # What a front end does

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        self.outputs[request_id] = []
        if self.half.offload is not None:
            self._name_blocks(prompt, max_tokens)
        more |= {"arrival_time": 0.0, "block_hasher": self._hasher}
        self.scheduler.add_request(Request(request_id, list(prompt), sampling, None, **more))

    def _name_blocks(self, prompt: list[int], max_tokens: int) -> None:
        """Note the hashes of all blocks that a right answer has."""
        text = Text(self.model.sights)
        text.extend(prompt + continuation(self.model.sights, prompt, max_tokens))
        sampling = SamplingParams(max_tokens=1)
        whole = Request("", text.tokens, sampling, None, arrival_time=0.0, block_hasher=self._hasher)
        for index, name in enumerate(whole.block_hashes):
            self._named[name] = text, (index + 1) * self._hash_tokens

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.ended.setdefault(request_id, ("aborted", None))

    def reset(self, *, running: bool, external: bool) -> None:
        """``/reset_prefix_cache``. vLLM cannot preempt requests that are being loaded, and raises."""
        try:
            self.scheduler.reset_prefix_cache(running, external)
        except RuntimeError as error:
            if "waiting for remote KV transfer" not in str(error):
                raise

    @property
    def is_busy(self) -> bool:
        """vLLM's engine core would step."""
        return bool(self._in_flight) or self.scheduler.has_requests()

    # A step

    def step(self) -> None:
        """Schedule and execute; take the results of this step, or with asynchronous scheduling the last."""
        self.steps += 1
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._in_flight.append((output, self._execute(output), self._device.launched))
        depth = 2 if self.settings.is_async else 1
        if len(self._in_flight) < depth and self.scheduler.has_requests():
            return
        if self._in_flight:
            output, results, launched = self._in_flight.popleft()
            self._device.run(launched)
            self._update(output, results)

    def _execute(self, output: Any) -> ModelRunnerOutput:
        worker, metadata, device = self.worker, output.kv_connector_metadata, self._device
        orders, sampled = metadata.orders, list[list[int]]()
        if orders.offload:
            # On a GPU snapshots and restores are in stream order, and here they are carried out at once.
            device.run(device.launched)
        self.runner.checker.check_stores(orders.offload.stores, self._named)
        if self.settings.is_v2:
            device.launch(lambda: self.runner.prepare(output), is_long=False)
            before = device.launched
            worker.handle_preemptions(metadata)
        else:
            before = device.launched
            worker.handle_preemptions(metadata)
            device.launch(lambda: self.runner.prepare(output), is_long=False)
        worker.bind_connector_metadata(metadata)
        device.launch(lambda: sampled.extend(self.runner.execute(output)))
        worker.start_load_kv(None)
        for hold in orders.holds:
            # The results that ended the request are known.
            assert self._device_steps.finished(hold.step)(), f"{hold.request_id} waits for a later step"
        if orders.loads:
            # What is loaded may wait for the steps before, and must not wait for this one.
            device.run(device.launched if orders.zeroes_loads else before)
        self._links.ordered(self.name, orders)
        worker.wait_for_save()
        connector_output = self._collect(output.finished_req_ids)
        worker.clear_connector_metadata()
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(
            ids,
            {request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )

    def _collect(self, finished: set[str]) -> KVConnectorOutput:
        """What the worker reports, each part of it some steps later than it could."""
        awaited = self._links.awaited(self.name)
        deadline = time.monotonic() + _AT_REST_S
        while True:
            results = self.worker.get_transfer_results(finished)
            self._raw.update(("sending", request_id) for request_id in results.finished_sending)
            self._raw.update(("recving", request_id) for request_id in results.finished_recving)
            self._failed.update(results.failed_recving)
            if awaited <= self._raw and self._offload_is_at_rest():
                break
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.name}: not ended within {_AT_REST_S} s: {awaited - self._raw}")
            time.sleep(0.0002)
        for key in sorted(awaited):
            # What came sooner than it had to waits here: when it comes depends on threads.
            self._raw.remove(key)
            self._links.ended(self.name, *key)
            self._due[key] = self.steps + self._rng.randrange(_MOST_DELAY_STEPS)
        if (report := self.worker.build_connector_worker_meta()) is not None:
            self._reports.append(report)
        due = {key for key, step in self._due.items() if step <= self.steps}
        for key in due:
            del self._due[key]
        received = {request_id for kind, request_id in due if kind == "recving"}
        failed = received & self._failed
        self._failed -= failed
        reports = self._reports and self._rng.random() < 0.6
        return KVConnectorOutput(
            finished_sending={request_id for kind, request_id in due if kind == "sending"},
            finished_recving=received,
            failed_recving=failed,
            kv_connector_worker_meta=self._reports.popleft() if reports else None,
        )

    def _offload_is_at_rest(self) -> bool:
        offload = self.worker._worker.offload
        if offload is None:
            return True
        return not any(offload.state().values())

    def _update(self, output: Any, results: ModelRunnerOutput) -> None:
        updated = self.scheduler.update_from_output(output, results)
        self.router.check(self.half)
        for outputs in updated.values():
            for each in outputs.outputs:
                self.outputs[each.request_id].extend(each.new_token_ids)
                if each.finish_reason is not None:
                    self.ended[each.request_id] = (str(each.finish_reason), each.kv_transfer_params)
        if self.settings.num_drafts and not self.settings.is_async and output.num_scheduled_tokens:
            ids = [
                request_id
                for request_id, tokens in zip(results.req_ids, results.sampled_token_ids, strict=True)
                if tokens and request_id in self.runner.rows
            ]
            self.scheduler.update_draft_token_ids(DraftTokenIds(ids, self.runner.drafts(ids)))

    # At the end

    def leftovers(self) -> dict[str, Any]:
        """What an idle engine must not have any more."""
        pool = self.scheduler.kv_cache_manager.block_pool
        counts = {"blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), **self.half.state()}
        counts["requests"] = len(self.scheduler.requests)
        return {name: count for name, count in counts.items() if count and name in _AT_REST}

    def complete(self, request_id: str, *beside: Engine) -> str:
        """Step, and engines beside this one too, until all of them are idle. Why a request ended."""
        while any(engine.is_busy for engine in (self, *beside)):
            for engine in (*beside, self):
                engine.step()
        return self.ended[request_id][0]

    def prefilled(self, request_id: str, prompt: list[int], **more: Any) -> dict[str, Any] | None:
        """The parameters for another engine, after this one computed the prompt."""
        self.add(request_id, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False}, **more)
        while request_id not in self.ended:
            self.step()
        return self.ended[request_id][1]

    def close(self) -> None:
        self.worker._worker.close()


_AT_REST = ("blocks", "requests", "held", "promised", "loading", "sharing", "streaming")
