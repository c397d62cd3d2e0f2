"""Translates vLLM's cache configuration for offload.

Which cache groups are kept, how many tokens their blocks and hashes have, which groups a draft model reads
ahead in, how block hashes are made, and which blocks of the device peers may fetch by them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvconnect.cache.identity import Naming
from kvconnect.config import OffloadConfig
from kvconnect.errors import ConfigError
from kvconnect.offload.namespace import salted
from kvconnect.vllm.geometry import group_spec, is_state, scheduler_config, transferred_groups
from kvconnect.vllm.requests import Adapters, named_with

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvconnect.offload.scheduler.hit_requirements import HitRequirements


def kept_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups whose blocks vLLM's prefix cache finds by hash: these are kept, the others are replayed."""
    return tuple(kv_cache_config.prefix_cacheable_group_ids)


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: Any) -> int:
    """The tokens of one block hash of a request."""
    configured = getattr(kv_cache_config, "hash_block_size", None)
    if configured:
        return int(configured)
    # vLLM before 0.32 computes it on demand.
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def check_blocks(kv_cache_config: Any, hash_tokens: int) -> None:
    """Raise ``ConfigError`` for a kept block that is not whole hash blocks, and for states not handed off."""
    kept = kept_groups(kv_cache_config)
    if not kept:
        raise ConfigError("offload is configured, but no cache group of this model is kept under hashes")
    advice = (
        "hybrid models (for example Mamba and attention) need prefix caching enabled so that block sizes "
        "align; accepted: --enable-prefix-caching, or no offload"
    )
    for index in kept:
        group = kv_cache_config.kv_cache_groups[index]
        block_tokens = int(group.kv_cache_spec.block_size)
        if block_tokens % hash_tokens:
            raise ConfigError(
                f"cache group {index} has blocks of {block_tokens} tokens, which are not divisible by the "
                f"hash block size, {hash_tokens}: {advice}"
            )
        mode = getattr(group_spec(group), "mamba_cache_mode", "align")
        if is_state(group_spec(group)) and mode != "align":
            raise ConfigError(
                f"cache group {index} keeps states in blocks of {block_tokens} tokens (hash block size "
                f"{hash_tokens}) with mamba_cache_mode {mode!r}, which hands off none to be kept: {advice}"
            )


def kept_config(kv_cache_config: Any) -> Any:
    """vLLM's cache configuration as if a connector transferred the kept groups only."""
    return SimpleNamespace(
        num_blocks=kv_cache_config.num_blocks,
        kv_cache_groups=kv_cache_config.kv_cache_groups,
        transfer_group_ids=kept_groups(kv_cache_config),
    )


def hit_requirements(vllm_config: VllmConfig, kv_cache_config: Any) -> HitRequirements:
    """Which blocks of the kept groups a prefix hit needs."""
    from kvconnect.offload.scheduler.hit_requirements import HitRequirements

    groups = scheduler_config(kept_config(kv_cache_config)).groups
    # A hit ends where the blocks of all groups end together.
    align = math.lcm(*(int(group.kv_cache_spec.block_size) for group in kv_cache_config.kv_cache_groups))
    drafts = _draft_groups(vllm_config, kv_cache_config)
    return HitRequirements.of(groups, kept_groups(kv_cache_config), align, drafts)


def _draft_groups(vllm_config: VllmConfig, kv_cache_config: Any) -> tuple[int, ...]:
    """Groups with a draft model's layers, whose KV of a token depends on the next token."""
    speculative = vllm_config.speculative_config
    if speculative is None or not speculative.use_eagle_block_drop():
        return ()
    kept, groups = kept_groups(kv_cache_config), kv_cache_config.kv_cache_groups
    marked = tuple(index for index in kept if groups[index].is_eagle_group)
    # Where vLLM does not know the draft's group, it treats all groups that keep tokens as such.
    return marked or tuple(index for index in kept if not is_state(group_spec(groups[index])))


class BlockHashes:
    """A request's content hashes, one for each block of any whole number of hash blocks.

    vLLM's hashes name an adapter by name and path. With ``adapters`` its contents go into the hash too.
    """

    def __init__(self, hash_tokens: int, adapters: Adapters | None = None) -> None:
        self._hash_tokens, self._adapters = hash_tokens, adapters
        self._with_adapter: WeakKeyDictionary[Any, list[bytes]] = WeakKeyDictionary()

    def __call__(self, view: Any, block_tokens: int) -> Sequence[bytes]:
        """The hash at the end of each whole block whose tokens vLLM knows. May be vLLM's own list."""
        hashes: Sequence[bytes] = view.block_hashes
        lora = getattr(view, "lora_request", None)
        if self._adapters is not None and lora is not None:
            # Each hash is made once.
            made = self._with_adapter.setdefault(view, [])
            digest = self._adapters.digest(lora) if len(made) < len(hashes) else b""
            made.extend(named_with(name, digest) for name in hashes[len(made) :])
            hashes = made
        step = block_tokens // self._hash_tokens
        return hashes if step == 1 else hashes[step - 1 :: step]


def naming(
    vllm_config: VllmConfig, kv_cache_config: Any, offload: OffloadConfig | None = None
) -> Naming | None:
    """How this server names KV for peers. None: names differ by process, or some group is not kept."""
    algorithm = str(getattr(vllm_config.cache_config, "prefix_caching_hash_algo", ""))
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("sha256"):
        from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

        # Other algorithms have a random seed.
        seed = DEFAULT_NONE_HASH_SEED
    if seed is None or kept_groups(kv_cache_config) != transferred_groups(kv_cache_config):
        return None
    hashing = salted(f"vllm {algorithm} from {seed!r}", offload)
    return Naming(hashing, hash_block_tokens(vllm_config, kv_cache_config))


class BlockNames:
    """A request's names for other nodes, also where a peer's names cover another number of tokens."""

    def __init__(self, vllm_config: VllmConfig, hash_tokens: int) -> None:
        self._algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hash_tokens = hash_tokens

    def __call__(self, request: Any, tokens: int) -> Sequence[bytes]:
        """See ``scheduler.stack.Names``."""
        if request.lora_request is not None:
            # vLLM's hashes have the adapter's path, which differs by machine.
            return ()
        if tokens == self._hash_tokens:
            known: Sequence[bytes] = request.block_hashes
            return known
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        unhashed = copy.copy(request)
        unhashed.block_hashes = []
        hasher = get_request_block_hasher(tokens, get_hash_fn_by_name(self._algorithm))
        made: Sequence[bytes] = hasher(unhashed)
        return made


class WatchedPool:
    """vLLM's block pool, the one that it binds its connectors to, as ``PrefixPool``.

    Its ``unpin_blocks`` gives up a reference to a block that is still read, and reports when the block goes
    to another request or the caches are reset.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._reused: list[int] = []

    def watch(self, group: int, hashes: Sequence[bytes]) -> Sequence[int]:
        """See ``PrefixPool``."""
        find, groups = self._pool.get_cached_block, [group]
        blocks = [found[0] if (found := find(name, groups)) else None for name in hashes]
        watched = [block for block in blocks if block is not None]
        # References that are taken and given up again: what remains are the watchers.
        self._pool.touch(watched)
        self._pool.unpin_blocks(reversed(watched), self._on_reuse)
        return [0 if block is None else int(block.block_id) for block in blocks]

    def take_reused(self) -> Sequence[int]:
        """See ``PrefixPool``."""
        reused, self._reused = self._reused, []
        return reused

    def refresh(self, block_ids: Sequence[int]) -> None:
        """See ``PrefixPool``. vLLM reuses the blocks at the end of a prefix first, as of its own requests."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        free = [block for block in blocks if not block.ref_cnt and block.block_hash is not None]
        self._pool.touch(free)
        self._pool.free_blocks(reversed(free))

    def _on_reuse(self, block: Any) -> None:
        self._reused.append(int(block.block_id))
