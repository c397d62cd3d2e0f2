"""Engines without threads or sockets, and a connector that copies pages between two of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from kvconnect.errors import PeerError
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.node.attention import Backend
from kvconnect.node.block_manager import BlockPool
from kvconnect.node.engine import NodeEngine
from kvconnect.node.models import CacheLayout, Model, build_model
from kvconnect.node.node_connector import Connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Output, Request
from kvconnect.node.serving import build_engine
from kvconnect.outcome import Cause
from kvconnect.transfer.orders import LetGo, Orders, Results
from tests.node.flex_attention import flex_backend

torch.set_num_threads(1)

MODEL_NAMES = ("gqa", "mla", "mixed", "sliding", "hybrid")
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
DEVICES = ("cpu", pytest.param("cuda", marks=ON_GPU))
MAX_STEPS = 5000


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(512) for _ in range(length)]


def check_pool(pool: BlockPool) -> None:
    """Prove the pool's invariants."""
    for block_id, references in enumerate(pool._references):
        if block_id <= pool.reserved:
            used = references or pool.is_free(block_id) or block_id in pool._key_of
            assert not used, f"block {block_id} is null or reserved, but is in use"
        else:
            assert (references == 0) == pool.is_free(block_id), f"block {block_id}: {references} references"
    assert {key: block for block, key in pool._key_of.items()} == pool._block_of


class OtherBackends:
    """A model whose attention backends are changed. Layers that shared one still do."""

    def __init__(self, model: Model, change: Callable[[Backend], Backend]) -> None:
        self.model, self.change = model, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def layout(self, *sizing: Any) -> CacheLayout:
        layout = self.model.layout(*sizing)
        backends = {id(layer.backend): layer.backend for layers in layout.groups for layer in layers}
        changed = {at: None if backend is None else self.change(backend) for at, backend in backends.items()}
        groups = tuple(
            tuple(replace(layer, backend=changed[id(layer.backend)]) for layer in layers)
            for layers in layout.groups
        )
        return replace(layout, groups=groups)


@dataclass
class Client:
    """Submits requests to an engine and keeps what comes back."""

    engine: NodeEngine
    outputs: dict[str, list[Output]] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def submit(
        self, name: str, prompt: list[int], max_tokens: int = 8, params: dict | None = None
    ) -> Request:
        self.outputs[name] = []
        request = Request(name, list(prompt), max_tokens, self.outputs[name].append, params)
        self.requests[name] = request
        self.engine.submit(request)
        return request

    def run(self, *names: str) -> None:
        """Steps until the named requests ended."""
        for _ in range(MAX_STEPS):
            self.engine.run_once()
            check_pool(self.engine.scheduler.manager.pool)
            if all(self.last(name) is not None for name in names):
                return
        raise AssertionError(f"{names} did not end within {MAX_STEPS} steps")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.run_once()
            check_pool(self.engine.scheduler.manager.pool)

    def last(self, name: str) -> Output | None:
        outputs = self.outputs[name]
        return outputs[-1] if outputs and outputs[-1].is_last else None

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def drafts(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.draft_token_ids or ()]

    def complete(self, prompt: list[int], max_tokens: int = 8, params: dict | None = None) -> list[int]:
        """Tokens of one request, and the draft tokens after them."""
        name = f"request-{len(self.outputs)}"
        self.submit(name, prompt, max_tokens, params)
        self.run(name)
        last = self.last(name)
        assert last is not None
        assert last.failure is None, last.failure
        return self.answer(name)

    def answer(self, name: str) -> list[int]:
        """The tokens of a request, and the draft tokens after them."""
        return self.tokens(name) + self.drafts(name)

    def together(self, prompts: Sequence[list[int]], *counts: int, steps: int = 0) -> list[list[int]]:
        """Answers to prompts that run at the same time, each submitted so many steps after the last.

        ``counts`` are their tokens to generate; the last is of all that follow.
        """
        names = [f"together-{index}" for index in range(len(prompts))]
        wanted = [*counts, *[counts[-1] if counts else 8] * len(prompts)]
        for name, prompt, count in zip(names, prompts, wanted, strict=False):
            self.submit(name, prompt, count)
            self.steps(steps)
        self.run(*names)
        return [self.answer(name) for name in names]

    @property
    def held(self) -> int:
        return self.engine.scheduler.manager.pool.num_held


def until(is_true: Callable[[], object], *clients: Client, timeout_s: float = 60.0) -> None:
    """Steps of the clients until something is true."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true in time"
        for client in clients:
            client.steps(1)
        time.sleep(0.001)


def make_client(
    connector: Connector | None = None,
    *,
    kernel_block_sizes: Sequence[int] = (),
    attention_backend: str = "sdpa",
    **options: object,
) -> Client:
    """A node. ``kernel_block_sizes`` are all that its attention takes, if any are given."""
    defaults = {"num_blocks": 256, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    made = NodeOptions(**{**defaults, **options})  # type: ignore[arg-type]
    change = None
    if attention_backend == "flex":
        change = partial(flex_backend, options=made)
    elif kernel_block_sizes:
        change = partial(replace, kernel_block_sizes=tuple(kernel_block_sizes))
    model = None
    if change is not None:
        model = OtherBackends(build_model(made.model, seed=made.seed, device=made.device), change)
    return Client(build_engine(made, connector, model))


@cache
def plain_node(**options: object) -> Client:
    """A node that keeps nothing and asks nobody, made once for all who ask it one thing after the other."""
    return make_client(**{**options, "enable_prefix_caching": False})  # type: ignore[arg-type]


def answer_of(prompt: Sequence[int], max_tokens: int = 8, **options: object) -> list[int]:
    """Tokens and draft tokens that a node computes by itself, once for all tests that ask for them."""
    return list(_computed(tuple(prompt), max_tokens, **options))


@cache
def _computed(prompt: tuple[int, ...], max_tokens: int, **options: object) -> list[int]:
    return plain_node(**options).complete(list(prompt), max_tokens)


class CopyConnector(SchedulerHalf):
    """Both halves of one node's connector. Loads copy the pages of ``peer``, when ``release`` says so.

    ``fail_with``: loads report this reason instead. ``defer``: how often to answer "ask again".
    """

    def __init__(self, peer: Client | None = None, *, hold_loads: bool = False) -> None:
        super().__init__()
        self.peer = peer
        self.hold_loads = hold_loads
        self.fail_with: str | None = None
        self.defer = 0
        self.is_state = False
        self.calls: list[tuple] = []
        self.allocated: dict[str, tuple[tuple[list[int], ...], int]] = {}
        self.loaded_once: set[str] = set()
        self.tensors: dict = {}
        self.client: Client | None = None
        self.order_ids: list[str] = []
        self.asked: list[str] = []
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: dict[str, str] = {}
        self.wake = lambda: None
        self.closed = False

    def attach(self, **options: object) -> Client:
        """A node that uses this connector."""
        recompute = options.pop("recompute", True)
        self.client = make_client(Connector(self, self, bool(recompute)), **options)
        self.tensors = dict(self.client.engine.runner.cache.tensors)
        self.is_state = not self.client.engine.scheduler.manager.reuses_prefixes
        return self.client

    # scheduler half
    def prefill_tokens(self, request):
        params = request.kv_transfer_params or {}
        if params.get("bad"):
            raise PeerError("kv_transfer_params.bad is not accepted")
        return request.num_tokens - (1 if self.is_state and params.get("do_remote_decode") else 0)

    def matched_tokens(self, request, num_computed_tokens):
        self.calls.append(("matched", request.request_id, num_computed_tokens))
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or request.request_id in self.loaded_once:
            return 0, False
        if self.defer > 0:
            self.defer -= 1
            return None, False
        wanted = request.num_tokens - (1 if self.is_state else 0)
        return max(0, wanted - num_computed_tokens), True

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        self.calls.append(("alloc", request.request_id, num_external_tokens))
        if num_external_tokens:
            self.loaded_once.add(request.request_id)
            self.allocated[request.request_id] = (block_ids, num_external_tokens)
            self.order_ids.append(request.request_id)

    def build_orders(self):
        ids, self.order_ids = self.order_ids, []
        return Orders(let_go=tuple(LetGo(name, ("", "", 0)) for name in ids))

    def request_finished(self, request, block_ids, *, delivered):
        self.calls.append(("finished", request.request_id, delivered))
        params = request.kv_transfer_params or {}
        if delivered and params.get("do_remote_decode"):
            return True, {"do_remote_prefill": True, "name": request.request_id, "blocks": block_ids}
        return False, None

    def update_results(self, results):
        self.calls.append(("results", results.sent, results.received))

    # worker half
    def before_step(self, orders):
        self.asked.extend(order.handle for order in orders.let_go)
        if not self.hold_loads:
            self.release()

    def changes(self):
        return None

    def on_results(self, wake):
        self.wake = wake

    def results(self):
        results = Results(tuple(self.sent), tuple(self.received), dict(self.failed))
        self.sent, self.received, self.failed = [], [], {}
        return results

    def close(self):
        self.closed = True

    def finished_calls(self, name: str) -> list[bool]:
        return [call[2] for call in self.calls if call[0] == "finished" and call[1] == name]

    def release(self) -> None:
        """Carry out the loads that wait."""
        asked, self.asked = self.asked, []
        for name in asked:
            self.received.append(name)
            if self.fail_with is not None:
                self.failed[name] = Cause.LOST(self.fail_with)
            elif self.peer is not None:
                self._copy(name)
        if asked:
            self.wake()

    def _copy(self, name: str) -> None:
        assert self.client is not None
        assert self.peer is not None
        block_ids, external = self.allocated[name]
        request = self.client.requests[name]
        params = request.kv_transfer_params
        assert params is not None
        cache, peer_cache = self.client.engine.runner.cache, self.peer.engine.runner.cache
        end = len(request.prompt_token_ids) - (1 if self.is_state else 0)
        for index, group in enumerate(cache.config.groups):
            first = 0 if group.is_state else (end - external) // group.block_size
            count = 1 if group.is_state else -(-end // group.block_size)
            for position in range(first, count):
                target, source = block_ids[index][position], params["blocks"][index][position]
                if target == 0:
                    continue
                assert source != 0, f"group {index} wants position {position}, the peer has freed it"
                # As a transfer does: only the kernel blocks that hold tokens.
                ratio = cache.tables.blocks_per_kv_block[index]
                held = ratio if group.is_state else -(-end // cache.kernel_block_sizes[index])
                pages = slice(0, min(ratio, held - position * ratio))
                for layer in group.layer_names:
                    self._copy_block(layer, ratio, pages, source, target, cache, peer_cache)
        connector = self.peer.engine.worker
        connector.sent.append(params["name"])  # type: ignore[union-attr]

    @staticmethod
    def _copy_block(layer, ratio, pages, source, target, cache, peer_cache) -> None:
        dim = cache.tensors[layer].axes.split().index("block")
        sources, targets = (
            torch.arange(block * ratio, (block + 1) * ratio)[pages].to(cache.device)
            for block in (source, target)
        )
        width = {1: torch.int8, 2: torch.int16}[cache.tensors[layer].tensor.dtype.itemsize]
        moved = peer_cache.tensors[layer].tensor.view(width).index_select(dim, sources)
        cache.tensors[layer].tensor.view(width).index_copy_(dim, targets, moved)


def prefilled(prompt: list[int], **options: object) -> tuple[CopyConnector, dict]:
    """P, which holds a prompt for others, and the parameters that it hands out for it."""
    prefill = CopyConnector()
    p = prefill.attach(**options)
    p.submit("p", prompt, 1, {"do_remote_decode": True})
    p.run("p")
    last = p.last("p")
    assert last is not None
    return prefill, dict(last.kv_transfer_params or {})
