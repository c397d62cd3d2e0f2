"""Puts a node together and serves it until a signal ends it.

The only file of the node that makes a connector: configuration in, two halves out.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvconnect.cache.attention_groups import GraphSupport
from kvconnect.cache.zeroing import KVBlockZeroer
from kvconnect.errors import ConfigError
from kvconnect.node.block_manager import BlockManager
from kvconnect.node.block_pool import BlockPool
from kvconnect.node.cache import (
    NodeCache,
    needs_zeroing,
    parse_cache_dtype,
    restrict_kernel_block_sizes,
)
from kvconnect.node.decode import Decoder, padded_sizes
from kvconnect.node.engine import Engine
from kvconnect.node.flex_attention import flex_layout
from kvconnect.node.hooks import SchedulerHooks, Transfers, WorkerHooks
from kvconnect.node.limits import SchedulerLimits
from kvconnect.node.models import build_model
from kvconnect.node.models.base import CacheSizing, Model
from kvconnect.node.runner import Runner
from kvconnect.node.scheduler import Scheduler
from kvconnect.node.server import NodeServer

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("sdpa", "flex")


@dataclass(frozen=True)
class NodeOptions:
    """What an operator can say about a node. ``block_size`` None is the model's own.

    ``reserved_blocks`` pins the first block ids, so that two nodes' ids differ.
    ``enable_prefix_caching`` False computes every prompt anew. ``kv_cache_dtype`` is auto, bf16 or
    fp8_e4m3. ``kernel_block_sizes`` are the only sizes in tokens that the attention kernels may take;
    empty: all that they can. ``enable_graphs`` None captures decode steps in CUDA graphs where the
    device and every backend allow it; True demands it. ``attention_backend`` is sdpa or flex.
    """

    model: str = "gqa"
    seed: int = 0
    device: str = "cpu"
    num_blocks: int = 1024
    block_size: int | None = None
    max_model_len: int = 4096
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 1024
    reserved_blocks: int = 0
    kv_transfer_config: str | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    kernel_block_sizes: tuple[int, ...] = ()
    enable_graphs: bool | None = None
    attention_backend: str = "sdpa"


@dataclass(frozen=True)
class Connector:
    """Both halves, and what becomes of a request whose load failed."""

    scheduler: SchedulerHooks
    worker: WorkerHooks
    recompute_failed_loads: bool = True


def build_engine(options: NodeOptions, connector: Connector | None = None) -> Engine:
    """A node's engine, not started. ``connector`` takes the place of the configured one.

    Raises:
        ConfigError: the options do not fit together.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {options.device!r}, but torch finds no CUDA device")
    if options.attention_backend not in ATTENTION_BACKENDS:
        raise ConfigError(
            f"attention_backend is {options.attention_backend!r}; accepted: {', '.join(ATTENTION_BACKENDS)}"
        )
    limits = SchedulerLimits(options.max_model_len, options.max_num_seqs, options.max_num_batched_tokens)
    pool = BlockPool(options.num_blocks, options.reserved_blocks)
    model = build_model(options.model, seed=options.seed, device=device)
    dtype = parse_cache_dtype(options.kv_cache_dtype)
    layout = model.layout(CacheSizing(options.block_size, options.max_model_len, dtype))
    if options.attention_backend == "flex":
        layout = flex_layout(
            layout,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            device=device,
        )
    if options.kernel_block_sizes:
        layout = restrict_kernel_block_sizes(layout, options.kernel_block_sizes)
    cache = NodeCache(
        layout,
        num_blocks=options.num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        device=device,
    )
    zeroer = KVBlockZeroer(cache.region_table(), device=device)
    runner = Runner(model, cache, zeroer, _make_decoder(options, model, cache))
    if connector is None and options.kv_transfer_config is not None:
        connector = _configured_connector(options, model, cache)
    transfers = None
    if connector is not None:
        connector.worker.register_kv_caches(cache.tensors)
        transfers = Transfers(connector.scheduler, recompute_failed_loads=connector.recompute_failed_loads)
    manager = BlockManager(
        cache.config,
        pool,
        options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
        zeroes_new_blocks=needs_zeroing(cache.config),
    )
    scheduler = Scheduler(limits, manager, transfers)
    return Engine(scheduler, runner, connector.worker if connector else None)


def _make_decoder(options: NodeOptions, model: Model, cache: NodeCache) -> Decoder | None:
    """Captured decode steps, or None where they are not wanted.

    Raises:
        ConfigError: they are demanded, and the device or an attention backend cannot do it.
    """
    support = cache.attention.graph_support
    refusal = None
    if cache.device.type != "cuda":
        refusal = f"device {options.device!r} has none"
    elif support < GraphSupport.UNIFORM_DECODE:
        weakest = min((group.backend for group in cache.attention.groups), key=lambda b: b.graph_support)
        refusal = f"attention backend {weakest.name} cannot be captured"
    if options.enable_graphs and refusal is not None:
        raise ConfigError(f"enable_graphs asks for CUDA graphs, but {refusal}")
    if options.enable_graphs is False or refusal is not None:
        return None
    return Decoder(model, cache, sizes=padded_sizes(options.max_num_seqs), captured=True)


def fingerprint(options: NodeOptions, model: Model, *, convert_dtype: bool = False) -> str:
    """What two nodes must have in common for one to continue with the other's cache.

    With ``convert_dtype`` the cache's type is not part of it, but that the other one says so too.
    """
    dtype = str(parse_cache_dtype(options.kv_cache_dtype)).removeprefix("torch.")
    kept = "convert_dtype=true" if convert_dtype else f"dtype={dtype}"
    return f"{model.name}:seed={options.seed}:{model.describe()}:{kept}"


def _configured_connector(options: NodeOptions, model: Model, cache: NodeCache) -> Connector:
    from kvconnect.config import parse_kv_transfer_config
    from kvconnect.peer.allow_list import AllowList
    from kvconnect.peer.keyring import load_keyring
    from kvconnect.scheduler.connector import SchedulerConnector
    from kvconnect.scheduler.handles import Handles
    from kvconnect.scheduler.trust import PeerTrust
    from kvconnect.worker.connector import WorkerConnector

    assert options.kv_transfer_config is not None
    config = parse_kv_transfer_config(options.kv_transfer_config)
    worker = WorkerConnector(
        config,
        cache.config,
        cache.kernel_block_sizes,
        model=fingerprint(options, model, convert_dtype=config.extra.convert_dtype),
    )
    keyring = load_keyring(config.extra, os.environ)
    scheduler = SchedulerConnector(
        config,
        cache.config,
        cache.kernel_block_sizes,
        directory=(worker.address(),),
        handles=Handles(keyring.handle_secret if keyring else b"", time.time),
        trust=PeerTrust(AllowList(config.extra.allow_peers), config.extra.max_peers),
    )
    return Connector(scheduler, worker, config.kv_load_failure_policy == "recompute")


async def _drain(engine: Engine) -> None:
    """Let peers fetch what is held for them, within ``drain_s``, and tell the others. Nothing new is held."""
    if engine.worker is None or engine.scheduler.transfers is None:
        return
    engine.scheduler.transfers.hooks.drain()
    if not await asyncio.get_running_loop().run_in_executor(None, engine.worker.drain):
        logger.warning("some requests were still held, or being sent, when the node ended")


async def _serve(options: NodeOptions, host: str, port: int) -> None:
    engine = build_engine(options)
    server = NodeServer(
        engine, model=options.model, seed=options.seed, vocab_size=engine.runner.model.dims.vocab_size
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        bound = await server.start(host, port)
        # What is here now stays: to look through it takes a collection longer than most transfers take.
        gc.collect()
        gc.freeze()
        shown = f"[{host}]" if ":" in host else host
        print(f"kvconnect node ready on http://{shown}:{bound}", flush=True)
        await stopped.wait()
        logger.info("stopping")
        server.refuse()
        await _drain(engine)
    finally:
        await server.stop()


def serve(
    *,
    model: str = "gqa",
    host: str = "127.0.0.1",
    port: int = 0,
    kv_transfer_config: str | None = None,
    device: str = "cpu",
    seed: int = 0,
    num_blocks: int = 1024,
    block_size: int | None = None,
    max_model_len: int = 4096,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 1024,
    reserved_blocks: int = 0,
    enable_prefix_caching: bool = True,
    kv_cache_dtype: str = "auto",
    kernel_block_sizes: Sequence[int] = (),
    enable_graphs: bool | None = None,
    attention_backend: str = "sdpa",
    num_threads: int | None = None,
) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT. ``port`` 0 lets the system choose.

    Prints one line with the address when the node takes requests. ``num_threads`` bounds torch's CPU
    threads.

    Raises:
        ConfigError: the options do not fit together.
        OSError: the port cannot be bound.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    options = NodeOptions(
        model=model,
        seed=seed,
        device=device,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        reserved_blocks=reserved_blocks,
        kv_transfer_config=kv_transfer_config,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
        kernel_block_sizes=tuple(kernel_block_sizes),
        enable_graphs=enable_graphs,
        attention_backend=attention_backend,
    )
    asyncio.run(_serve(options, host, port))
