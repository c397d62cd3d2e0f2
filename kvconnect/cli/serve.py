"""``kvconnect serve``: options and help texts."""

from __future__ import annotations

import logging
import re
from typing import Annotated

import typer

from kvconnect.errors import ConfigError


def serve(
    model: Annotated[str, typer.Option(help="gqa, mla, mixed, sliding or hybrid.")] = "gqa",
    host: Annotated[str, typer.Option(help="Address to serve HTTP on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to serve HTTP on; 0 takes a free one.")] = 8000,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="What makes this node transfer KV caches, or keep them in host memory and on disk: a JSON "
            "object, spelled as vLLM does. Left out, the node serves alone and keeps nothing.",
        ),
    ] = None,
    kv_events_config: Annotated[str | None, typer.Option(metavar="JSON", help="As vLLM's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the model's weights; a pair needs the same one.")] = 0,
    num_blocks: Annotated[
        int, typer.Option(help="Logical blocks of KV cache, the null block included.")
    ] = 512,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per logical block; left out, the model's own.")
    ] = None,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence, in tokens.")] = 4096,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 1024,
    reserved_blocks: Annotated[
        int, typer.Option(help="Blocks never used, so that two nodes use different block ids (for tests).")
    ] = 0,
    enable_prefix_caching: Annotated[
        bool, typer.Option(help="Take the beginning of a prompt from blocks that hold it already.")
    ] = True,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="What the cache keeps: auto (the model's own), bf16 or fp8_e4m3.")
    ] = "auto",
    num_threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads for torch; left out, its own choice.")
    ] = None,
) -> None:
    """Serve a small model over HTTP, alone or as one side of a pair."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device is {device!r}; accepted: cpu, cuda, cuda:N")
    from kvconnect.node.options import NodeOptions
    from kvconnect.node.serve import serve as serve_node

    options = NodeOptions(
        model=model,
        kv_transfer_config=kv_transfer_config,
        kv_events_config=kv_events_config,
        device=device,
        seed=seed,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        reserved_blocks=reserved_blocks,
        enable_prefix_caching=enable_prefix_caching,
        kv_cache_dtype=kv_cache_dtype,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        serve_node(options, host=host, port=port, num_threads=num_threads)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot serve on {host}:{port}: {error}") from error
