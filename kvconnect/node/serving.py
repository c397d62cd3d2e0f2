"""Builds a node and serves it until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading

import torch

from kvconnect.addresses import join_address
from kvconnect.errors import ConfigError
from kvconnect.node.block_manager import BlockManager, BlockPool
from kvconnect.node.engine import NodeEngine, Runner
from kvconnect.node.http_server import on_stop_signals
from kvconnect.node.kv_cache import NodeCache, parse_cache_dtype
from kvconnect.node.models import Model, build_model
from kvconnect.node.node_connector import Connector, configured_connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.scheduler import Scheduler
from kvconnect.node.server import HttpLimits, NodeServer

logger = logging.getLogger(__name__)


def build_engine(
    options: NodeOptions, connector: Connector | None = None, model: Model | None = None
) -> NodeEngine:
    """A node's engine, not started. ``connector`` and ``model`` replace the configured ones.

    Raises ``ConfigError`` if the options do not fit together.
    """
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {options.device!r}, but torch finds no CUDA device")
    pool = BlockPool(options.num_blocks, options.reserved_blocks)
    model = model or build_model(options.model, seed=options.seed, device=device)
    dtype = parse_cache_dtype(options.kv_cache_dtype)
    layout = model.layout(options.block_size, options.max_model_len, dtype)
    cache = NodeCache(layout, options)
    runner = Runner(model, cache)
    connector = connector or configured_connector(options, model, cache, pool)
    manager = BlockManager(
        cache.config,
        pool,
        options.max_num_batched_tokens,
        enable_prefix_caching=options.enable_prefix_caching,
    )
    recomputes = connector.recompute_failed_loads
    scheduler = Scheduler(options, manager, connector.scheduler, recompute_failed_loads=recomputes)
    return NodeEngine(scheduler, runner, connector)


async def _drain(engine: NodeEngine, over: asyncio.Event) -> None:
    """Hold no new KV. Let peers fetch held KV within ``drain_s``, then notify those that have not.

    Returns when the drain has ended, or ``over`` is set.
    """
    loop, ended = asyncio.get_running_loop(), []
    engine.scheduler.hooks.drain()

    def drain() -> None:
        ended.append(engine.worker.drain())
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(over.set)

    # A thread outside of the loop's executor, whose threads the loop waits for at its end.
    threading.Thread(target=drain, name="kvconnect-drain", daemon=True).start()
    await over.wait()
    if ended != [True]:
        logger.warning(
            "the node ends while requests are still held or sent, as drain_s is over: their decode nodes "
            "compute them"
        )


async def _serve(options: NodeOptions, host: str, port: int) -> None:
    engine = build_engine(options)
    server = NodeServer(engine, HttpLimits().within_open_files())
    stopped, over = asyncio.Event(), asyncio.Event()
    on_stop_signals(lambda: (over if stopped.is_set() else stopped).set())
    try:
        bound = await server.start(host, port)
        # Objects made at the start stay: scanning them would take a collection longer than most transfers.
        gc.collect()
        gc.freeze()
        print(f"kvconnect node ready on http://{join_address(host, bound)}", flush=True)
        await stopped.wait()
        logger.info("stopping; a second signal ends the node at once")
        server.refuse()
        await _drain(engine, over)
    finally:
        await server.stop()


def serve(options: NodeOptions, *, host: str, port: int, num_threads: int | None = None) -> None:
    """Serve a model over HTTP until SIGTERM or SIGINT. Prints one line with the address when ready.

    Raises:
        ConfigError: the options do not fit together.
        OSError: the port cannot be bound.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    asyncio.run(_serve(options, host, port))
