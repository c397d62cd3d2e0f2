"""The time to the first token of a prompt that comes back: computed again, or found where its blocks are.

One node computes with a decoder of serving size. A node without tiers computes the prompts. Then one with
tiers computes them, is asked again at once, and again when others have overwritten its pool; after a restart
it has nothing but what is on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import mmap
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from benchmarks.cache import Layout
from benchmarks.harness import report
from benchmarks.model import BenchModel
from benchmarks.node import ModelOptions
from kvconnect.cache.specs import div_ceil
from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.request import Output, Request
from kvconnect.node.serving import build_engine

BLOCK_TOKENS = 16
LAYOUT = Layout("nhd", BLOCK_TOKENS)
# The pool has room for this many prompts: of more, the first is overwritten before it comes back.
POOL_PROMPTS = 2
_NAP_S = 0.002
_SEED = 11
_WARM_UPS = 2
# The first ways of a report find nothing.
_COMPUTED_WAYS = 2

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Options(ModelOptions):
    """A run."""

    SUITED: ClassVar = {**ModelOptions.SUITED, "prompt_tokens": (2048, 16384)}

    prompt_tokens: Annotated[int, "Tokens of a prompt; default: 16384, on a CPU 2048."] = 0
    prompts: Annotated[int, "Prompts that come back, one after the other."] = 5
    batched_tokens: Annotated[int, "Tokens that a step computes."] = 8192
    disk_path: Annotated[Path | None, "A folder on the disk to measure; left out, a new temporary one."] = (
        None
    )
    timeout_s: Annotated[float, "Seconds that one prompt may take."] = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("prompt_tokens", 2 * BLOCK_TOKENS), ("prompts", POOL_PROMPTS + 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}, it must be at least {least}")

    @property
    def prompt_blocks(self) -> int:
        """Blocks of a prompt and its first token."""
        return div_ceil(self.prompt_tokens + 1, BLOCK_TOKENS)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool: the null block too, and a little more than it needs."""
        return 1 + POOL_PROMPTS * self.prompt_blocks + self.prompt_blocks // 2

    @property
    def kept_bytes(self) -> int:
        """Memory, and disk, for all prompts that come back, and for the one that warms up."""
        return (self.prompts + 2) * self.prompt_blocks * BLOCK_TOKENS * self.size.token_bytes


# ---- what the operating system keeps of files in memory


def drop_pages(folder: Path) -> None:
    """Ask the system to forget what it keeps of all files below a folder, once that is on the disk."""
    for path in _files(folder):
        with _opened(path) as handle:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(folder: Path) -> float | None:
    """Which part of the bytes below a folder is in memory, 0 to 1; None where that is unknown."""
    total = resident = 0
    for path in _files(folder):
        with _opened(path) as handle:
            length = os.fstat(handle).st_size
            if not length:
                continue
            counted = _resident_pages(handle, length)
            if counted is None:
                return None
            resident += counted * mmap.PAGESIZE
            total += length
    return min(1.0, resident / total) if total else 0.0


def _resident_pages(handle: int, length: int) -> int | None:
    # Private and writable: ctypes takes no address of what cannot be written to.
    with mmap.mmap(handle, length, flags=mmap.MAP_PRIVATE) as mapped:
        view = ctypes.c_char.from_buffer(mapped)
        flags = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
        try:
            failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(length), flags)
        finally:
            # The mapping cannot be closed while something points into it.
            del view
        return None if failed else sum(flag & 1 for flag in flags)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDWR)
    try:
        yield handle
    finally:
        os.close(handle)


# ---- a node


@dataclass(frozen=True)
class First:
    """The first token of a prompt, the seconds until it was there, and the tokens not computed for it."""

    seconds: float
    token: int
    cached_tokens: int


class Node:
    """A node over ``model`` in a ``with`` block. With ``disk`` it keeps blocks in host memory and there."""

    def __init__(self, options: Options, model: BenchModel, disk: Path | None) -> None:
        self._timeout_s = options.timeout_s
        self._names = (f"prompt-{number}" for number in itertools.count())
        made = NodeOptions(
            device=options.device,
            num_blocks=options.num_blocks,
            block_size=BLOCK_TOKENS,
            max_model_len=options.prompt_tokens + BLOCK_TOKENS,
            max_num_seqs=1,
            max_num_batched_tokens=options.batched_tokens,
            kv_transfer_config=None if disk is None else _offload(options, disk),
        )
        self.engine = build_engine(made, model=model)
        model.attach(self.engine.runner.cache)

    def __enter__(self) -> Node:
        self.engine.start()
        # What is on disk from before is known then.
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    def first_token(self, prompt: Sequence[int]) -> First:
        """Ask for one token.

        Raises:
            KVConnectError: there was none in time.
        """
        there, outputs = threading.Event(), []

        def take(output: Output) -> None:
            outputs.append((time.perf_counter(), output))
            there.set()

        asked = time.perf_counter()
        self.engine.submit(Request(next(self._names), list(prompt), 1, take))
        if not there.wait(self._timeout_s):
            raise KVConnectError(f"there was no first token within {self._timeout_s:g} s")
        at, output = outputs[0]
        if output.failure is not None:
            raise KVConnectError(f"a prompt failed: {output.failure.message}")
        return First(at - asked, output.token_ids[0], output.cached_tokens)

    def settle(self) -> None:
        """Wait until everything that is to be kept has been written.

        Raises:
            KVConnectError: that took too long.
        """
        state = self.engine.offload_state
        deadline = time.monotonic() + self._timeout_s
        while state is not None and any(state()["busy"].values()):
            if time.monotonic() > deadline:
                raise KVConnectError(f"blocks were still being kept after {self._timeout_s:g} s: {state()}")
            time.sleep(_NAP_S)


def _offload(options: Options, disk: Path) -> str:
    offload = {
        "cpu_bytes": options.kept_bytes,
        "disk_path": str(disk),
        "disk_bytes": max(1 << 20, 2 * options.kept_bytes),
        "max_queued_bytes": options.kept_bytes,
        "wait_s": 60.0,
    }
    extra = {"engine": "none", "insecure": True, "offload": offload}
    return json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": extra})


# ---- the order of things


def bench_returning(options: Options) -> int:
    """Time the first token of a prompt that comes back: computed anew, from the GPU, host memory, or disk.

    ``page_cache`` is the part of the disk tier's files that was in memory before it was read. Returns the
    exit code: 1 if something was not found where it was kept.

    Raises:
        KVConnectError: a node could not be built, or did not answer in time.
    """
    with contextlib.ExitStack() as stack:
        disk = options.disk_path
        if disk is None:
            disk = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-bench-")))
        page_cache, seen = _measure(options, disk)
    ways = [_way(name, firsts, seen["recomputed"]) for name, firsts in seen.items()]
    run = {
        "device": options.device,
        "model": options.model,
        "prompt_tokens": options.prompt_tokens,
        "kv_bytes": options.prompt_tokens * options.size.token_bytes,
        "page_cache": page_cache,
    }
    for way in ways:
        report("returning", {**run, **way})
    expected = (options.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return 0 if all(way["cached_tokens"] == expected for way in ways[_COMPUTED_WAYS:]) else 1


def _measure(options: Options, disk: Path) -> tuple[float | None, dict[str, list[First]]]:
    """How much of the disk tier's files was in memory, and the first tokens by the way to them."""
    model = BenchModel(options.size, LAYOUT, options.device)
    rng = random.Random(_SEED)

    def made(count: int) -> list[list[int]]:
        return [rng.choices(range(options.size.vocab), k=options.prompt_tokens) for _ in range(count)]

    prompts, others = made(options.prompts), made(_WARM_UPS)
    seen: dict[str, list[First]] = {}
    with Node(options, model, None) as plain:
        _all(plain.first_token, others)
        seen["recomputed"] = _all(plain.first_token, prompts)
    with Node(options, model, disk) as node:
        for prompt in others:
            node.first_token(prompt)
            node.settle()
        seen["computed, and kept"], seen["own prefix cache"] = [], []
        for prompt in prompts:
            seen["computed, and kept"].append(node.first_token(prompt))
            node.settle()
            seen["own prefix cache"].append(node.first_token(prompt))
            node.settle()
        seen["CPU tier"] = _all(node.first_token, prompts, node.settle)
    drop_pages(disk)
    page_cache = resident_share(disk)
    with Node(options, model, disk) as node:
        # Its copies are warmed up by a prompt that was kept too.
        _all(node.first_token, others[:1], node.settle)
        drop_pages(disk)
        seen["disk tier"] = _all(node.first_token, prompts, node.settle)
    return page_cache, seen


def _all(
    ask: Callable[[Sequence[int]], First],
    prompts: Sequence[Sequence[int]],
    settle: Callable[[], None] = lambda: None,
) -> list[First]:
    firsts = []
    for prompt in prompts:
        firsts.append(ask(prompt))
        settle()
    return firsts


def _way(name: str, firsts: Sequence[First], recomputed: Sequence[First]) -> dict[str, Any]:
    """One way to the first token of the prompts. Seconds are a median with the least and the most.

    ``cached_tokens`` are of one prompt, those that were not computed; ``as_recomputed`` counts the prompts
    whose token was that of the node without tiers.
    """
    seconds = [first.seconds for first in firsts]
    median = statistics.median(seconds)
    return {
        "way": name,
        "seconds": median,
        "least_s": min(seconds),
        "most_s": max(seconds),
        "times_faster": statistics.median(first.seconds for first in recomputed) / median,
        "cached_tokens": min(first.cached_tokens for first in firsts),
        "as_recomputed": sum(a.token == b.token for a, b in zip(firsts, recomputed, strict=True)),
        "prompts": len(firsts),
    }
