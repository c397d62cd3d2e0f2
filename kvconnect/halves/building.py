"""The only place that makes the parts of the two halves, from a configuration and a stack's traits.

A stack states its caches, its requests and what its KV depends on; it makes no part itself.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvconnect.addresses import RankAddress, join_address
from kvconnect.cache.specs import KVCacheConfig
from kvconnect.config import TransferConfig
from kvconnect.decode.decode_requests import DecodeRequests
from kvconnect.decode.pulls import PullRequests
from kvconnect.errors import LocalError
from kvconnect.halves.rank_traits import KeptCache, RankTraits
from kvconnect.halves.receipts import Receipts
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.halves.worker_half import TransferWorker, WorkerHalf
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.bootstrap import Bootstrap
from kvconnect.peer.handles import Handles, PeerTrust, new_handle
from kvconnect.peer.keyring import load_keyring, names_key
from kvconnect.prefill.prefill_requests import PrefillRequests
from kvconnect.transfer.orders import OrdersDraft
from kvconnect.transfer.stack import StackTraits

# The tiers are a fifth of the package: a node without offload does not load them.
if TYPE_CHECKING:
    from kvconnect.offload.scheduler.host import KeptBlocks
    from kvconnect.offload.scheduler.shared_prefixes import SharedPrefixes
    from kvconnect.offload.worker.offload_worker import OffloadWorker


class Trust(NamedTuple):
    """How handles are made and read, the peers that D may fetch from, and the secret that signs receipts.

    ``peers`` None: any that a request names. ``receipt_secret`` empty: receipts are not signed.
    ``new_handle`` returns a random handle.
    """

    handles: Handles
    peers: PeerTrust | None = None
    receipt_secret: bytes = b""
    new_handle: Callable[[], str] = new_handle


def configured_trust(config: TransferConfig, environ: Mapping[str, str], clock: Callable[[], float]) -> Trust:
    """The trust of a configuration: the secret from files or ``environ``, and the allowed peers.

    A node without an engine has a secret, for receipts, only where a key is named.
    Raises ``ConfigError``: keys or allowed peers are not valid.
    """
    extra = config.extra
    keyring = load_keyring(extra, environ) if extra.engine != "none" or names_key(extra, environ) else None
    handles = Handles(keyring.handle_secret if keyring else b"", clock)
    peers = PeerTrust(AllowList(extra.allow_peers), extra.max_peers)
    return Trust(handles, peers, keyring.receipt_secret if keyring else b"")


def build_scheduler_half(
    config: TransferConfig,
    cache_config: KVCacheConfig,
    traits: StackTraits | None = None,
    *,
    directory: Sequence[RankAddress] = (),
    trust: Trust | None = None,
    kept: KeptBlocks | None = None,
    shared: Callable[[OrdersDraft], SharedPrefixes] | None = None,
) -> SchedulerHalf:
    """Make the half beside the request scheduler.

    Args:
        cache_config: only its block sizes, counts and kinds are read.
        directory: the addresses of the worker ranks; empty without an engine.
        trust: None for handles of one process, and any peer that a request names; unsigned receipts.
        shared: makes the names of the stack's prefix cache; None if peers may not fetch its blocks by name.

    Raises:
        ConfigError: engine id and host are too long for a handle, or ``kept`` does not fit into memory.
        LocalError: the directory is empty, and the configuration names an engine.
    """
    traits, trust = traits or StackTraits(), trust or Trust(Handles(clock=time.time))
    ranks = sorted(directory, key=lambda address: address.rank)
    draft, offload = OrdersDraft(ranks, traits.clock, traits.zeroes_loads), None
    if kept is not None and config.extra.offload is not None:
        from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler

        offload = OffloadScheduler(config.extra.offload, kept, draft)
    rank0 = draft.directory[0] if draft.directory else None
    receipts = Receipts(
        config.engine_id,
        "" if rank0 is None else join_address(rank0.host, rank0.port),
        traits,
        trust.receipt_secret,
        is_for_all=config.extra.receipts,
        wall_clock=trust.handles.clock,
        warn=draft.warn,
    )
    make_half = functools.partial(SchedulerHalf, draft, offload=offload, receipts=receipts)
    if config.extra.engine == "none":
        return make_half()
    if rank0 is None:
        raise LocalError("the scheduler half needs the address of rank 0 at least")
    groups = cache_config.groups
    # A recurrent state cannot be rolled back by the token that D computes itself.
    has_states = any(group.is_state for group in groups)
    traits = dataclasses.replace(traits, held_back=max(traits.held_back, int(has_states)))
    prefill = decode = pulls = None
    prefixes = None if shared is None else shared(draft)
    if config.is_producer:
        prefill = PrefillRequests(config, groups, traits, trust.handles, trust.new_handle, draft)
        prefill.keeps_named = traits.naming is not None and bool(config.extra.offload or prefixes)
        if config.extra.bootstrap_port:
            listens_at = config.extra.here(0).listens_at
            answer = bootstrap_answer(rank0, trust.handles)
            prefill.bootstrap = Bootstrap(listens_at, config.extra.bootstrap_port, answer)
    if config.is_consumer:
        parking = None
        if offload is not None and kept is not None and kept.parks and traits.clock is not None:
            groups_moved = {index for index, group in enumerate(groups) if group.has_cache}
            parking = offload.parking if groups_moved <= set(offload.host.plan.groups) else None
        decode = DecodeRequests(config, cache_config, traits, trust.handles, trust.peers, draft, parking)
        if traits.names and traits.naming and traits.clock:
            pulls = PullRequests(config, groups, traits, trust.peers, trust.new_handle, draft)
    return make_half(prefill=prefill, decode=decode, pulls=pulls, shared=prefixes)


def bootstrap_answer(rank0: RankAddress, handles: Handles) -> bytes:
    """P's answer in Mooncake's bootstrap protocol: the engine id, which routers pass to D, is a handle of P.

    It stays valid while P listens on that port, also for the next process there.
    """
    engine_id = handles.introduce(rank0.host, rank0.port)
    where = {"0": {"0": f"tcp://{rank0.host}:{rank0.port}"}}
    return msgspec.json.encode({"0": {"engine_id": engine_id, "worker_addr": where}})


def build_worker_half(config: TransferConfig, traits: RankTraits) -> WorkerHalf:
    """Make the half beside the tensors of one rank: it registers the caches, and serves peers from then on.

    Raises:
        ConfigError: a configured folder, address, key or memory is not available.
        EngineError: the engine is not usable on this machine, or refuses the memory.
        LayoutError: a cache cannot be expressed.
    """
    transfer = offload = None
    with ExitStack() as opened:
        # The offload first: the introduction to peers names its rows, and no part depends on it if it fails.
        if (kept := traits.kept) is not None and config.extra.offload is not None:
            offload = _open_offload(config, traits, kept, opened)
        if traits.sent is not None and config.extra.engine != "none":
            transfer = TransferWorker(config, traits, offload)
        opened.pop_all()
    return WorkerHalf(transfer, offload)


def _open_offload(
    config: TransferConfig, traits: RankTraits, kept: KeptCache, opened: ExitStack
) -> OffloadWorker:
    from kvconnect.offload.worker.offload_worker import OffloadWorker

    assert config.extra.offload is not None
    offload = OffloadWorker(
        config.extra.offload,
        kept.cache,
        identity=kept.identity,
        rank=traits.rank,
        world_size=traits.world_size,
        reserved_bytes=traits.reserved_bytes,
        least_rows=kept.requirements.least_rows(config.extra.offload.min_tokens),
        label=kept.label,
        announces=kept.announces,
    )
    # On any failure, so that no folder stays locked and no memory taken.
    opened.callback(offload.close)
    if kept.naming is not None and config.is_producer and config.extra.engine != "none":
        offload.name_rows(kept.naming, kept.requirements)
    if config.is_consumer and config.extra.engine != "none" and config.extra.offload.park_share:
        offload.open_for_loads()
    return offload
