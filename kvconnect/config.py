"""The configuration, in vLLM's spelling, parsed once into a frozen value.

``kv_transfer_config`` is vLLM's JSON object; kvconnect's settings are in its ``kv_connector_extra_config``.
All errors are reported at once, each with the key, the value, the accepted values and the nearest known key.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from kvconnect.addresses import ANY, address_within, is_loopback, split_address
from kvconnect.packages import engine_entry_points, engine_mistakes
from kvconnect.reading import json_object, read_what_can_be, refuse

CONNECTOR: Literal["KVConnect"] = "KVConnect"
RELEASE_KEY = "kvconnect_release"
"""Key of a router's secret name for what P computes and holds for a request.

P gets it with the request. With ``do_remote_prefill`` in a later one, which computes nothing, it ends the
leases of all requests that came with it: the client left, and no decode node will fetch.
"""

FIRST_TOKEN_KEY = "first_token"
"""In ``kv_transfer_params`` of a decode request: the token that its output begins with."""
_LEAST_QUARANTINE_S = 15.0
_RANKS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_OFFLOAD = "kv_connector_extra_config.offload"
_LEAST_DISK_BYTES = 1 << 20

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Bound = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

LaneKind = Literal["nvlink", "cuda_ipc", "rdma", "tcp", "shared_memory", "unknown"]
"""The lanes to a peer; ``unknown`` where the lane cannot be determined."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config.ranks``: what is set here is so on these ranks.

    Attributes:
        host: the address that peers use, or a network.
        bind: where they listen, or a network.
        device_name: network devices for the engine.
    """

    host: str = ""
    bind: str = ""
    device_name: str = ""


def ranks_of(text: str) -> list[range]:
    """The ranks that a key of ``ranks`` names, such as ``0``, ``4-7`` or ``0,8-9``; none if it is wrong."""
    found = [_RANKS.fullmatch(part) for part in text.split(",")]
    named = [range(int(one[1]), int(one[2] or one[1]) + 1) for one in found if one is not None]
    return named if len(named) == len(found) and all(named) else []


def _rank_mistakes(keys: Iterable[str], where: str) -> Iterator[str]:
    """Keys that name no ranks, and ranks that are named twice."""
    named = [(ranks.start, ranks.stop, key) for key in keys for ranks in ranks_of(key) or [range(0)]]
    for begin, end, key in named:
        if begin == end:
            yield f"{where} has {key!r}; accepted: ranks such as '0', '4-7' and '0,8-9'"
        both = [other for first, last, other in named if first <= begin < last]
        if len(both) > 1:
            yield f"{where} has {both}, which both name rank {begin}; accepted: each rank once"


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config.offload``: memory below the device's, in which blocks are kept for later.

    All sizes are those of one worker rank.

    Attributes:
        cpu_bytes: bytes of host memory for blocks.
        shares: which part of ``cpu_bytes`` each cache group has, by group; empty for shares by what a prompt
            of usual length leaves in each. Groups with equally long blocks share theirs.
        decoded: whether blocks that were filled while decoding are kept too.
        checkpoint_tokens: windows and states are kept at the end of a prompt and of an answer, and every so
            many tokens in between; 0 for never.
        min_tokens: fewer tokens than this are computed rather than restored.
        wait_s: how long a request waits for lower tiers.
        disk_path: a folder for blocks on disk; empty for none. Ranks and models have their own folders in it.
        disk_bytes: most bytes on disk, at least 1 MiB with ``disk_path``; folders of other models there that
            no process uses count too, and make room first.
        max_queued_bytes: most bytes that wait to be written to lower tiers; more are not written.
        store: the address ``host:port`` of a Mooncake Store master; empty for no shared tier.
        store_metadata: the metadata server of that store.
        store_protocol: ``tcp`` or ``rdma``.
        store_bytes: memory that this rank gives to the store.
        salt: nothing that was kept under another salt is found.
        pin_quota: which part of host memory, and of the disk, one tenant's sessions may pin; 0 for none. All
            together may pin three quarters.
        peer_share: which part of ``cpu_bytes``, below 1, is for reading from disk what peers fetch; 0 for
            none. Left out, a sixteenth on a node with a disk that peers may ask.
        tenant_key: the key of ``kv_transfer_params`` that names a tenant; empty for the ``cache_salt``.
        park_share: which part of ``cpu_bytes`` a decode node may fill with KV of requests that wait for
            blocks, so that the prefill node need not hold it; 0 for none.
        park_after_s: how long such a request waits before its KV is fetched into host memory.
    """

    cpu_bytes: Bound
    shares: tuple[Share, ...] = ()
    decoded: bool = True
    checkpoint_tokens: Size = 4096
    min_tokens: Bound = 1
    wait_s: Seconds = 2.0
    disk_path: str = ""
    disk_bytes: Size = 0
    max_queued_bytes: Bound = 1 << 30
    store: str = ""
    store_metadata: str = "P2PHANDSHAKE"
    store_protocol: Literal["tcp", "rdma"] = "tcp"
    store_bytes: Size = 0
    salt: str = ""
    pin_quota: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    peer_share: Annotated[float, msgspec.Meta(ge=0, lt=1)] | None = None
    tenant_key: str = ""
    park_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    park_after_s: Annotated[float, msgspec.Meta(ge=0)] = 0.25


def _offload_mistakes(offload: OffloadConfig) -> Iterator[str]:
    """Settings that do not go together."""
    if sum(offload.shares) > 1 + 1e-9:
        yield (
            f"{_OFFLOAD}.shares is {list(offload.shares)}, which adds up to {sum(offload.shares):g}; "
            "accepted: numbers above 0 that add up to at most 1"
        )
    for name, of in (("disk_bytes", "disk_path"), ("store_bytes", "store")):
        if (value := getattr(offload, name)) and not getattr(offload, of):
            yield f"{_OFFLOAD}.{name} is {value} and there is no {of}; accepted: both, or neither"
    if offload.disk_path and offload.disk_bytes < _LEAST_DISK_BYTES:
        least = f"with disk_path it must be at least {_LEAST_DISK_BYTES}"
        yield f"{_OFFLOAD}.disk_bytes is {offload.disk_bytes}, {least}"
    if offload.store and split_address(offload.store) is None:
        yield f"{_OFFLOAD}.store is {offload.store!r}, accepted: host:port, and '' for no store"
    if offload.store and not offload.store_metadata:
        accepted = "accepted: P2PHANDSHAKE, or the address of a metadata server"
        yield f"{_OFFLOAD}.store_metadata is empty; {accepted}"


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds and times that no operator sets: constants, or what follows from a setting (``derived``).

    Attributes:
        retry_max_s: how long at most a peer that could not be reached is left alone.
        handshake_timeout_s: how long a peer may take to answer the first greeting.
        quarantine_s: how long slots stay unused after the last moment at which a peer may have begun to
            write to them: when it answered that it stopped, or when the time it was given is over.
        early_fetch_s: how long a fetch waits for a prefill that its worker does not know yet.
        find_s: how long a request waits for what peers answer that are asked for its KV by name.
        max_message_bytes: largest side-channel message that is accepted.
        max_leases: most requests that wait to be fetched at one time.
        max_loads: most requests that are fetched at one time; more wait their turn.
        max_peers: most peers that are remembered, each way.
        first_rank: the number that rank 0 of this node has in ``ranks``.
    """

    retry_max_s: float = 10.0
    handshake_timeout_s: float = 5.0
    quarantine_s: float = 40.0
    early_fetch_s: float = 5.0
    find_s: float = 0.5
    max_message_bytes: int = 16 << 20
    max_leases: int = 4096
    max_loads: int = 256
    max_peers: int = 256
    first_rank: int = 0


class ExtraConfig(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config``: the engine, the address, and every bound and deadline.

    Attributes:
        engine: the transfer library, by the name of its entry point; ``auto`` takes NIXL or Mooncake, what
            works here, and logs which; ``none`` for a node that only offloads.
        protocol: how the engine reaches its peer; ``auto`` for its own choice. Mooncake knows ``tcp``,
            ``rdma``, and ``nvlink`` between GPUs of one host, its choice on GPUs where ``host`` is a loopback
            address; NIXL takes a backend such as ``UCX``. With ``auto``, bytes between CPU caches of one
            machine go through shared memory.
        device_name: network devices for the engine: RDMA adapters for Mooncake, comma separated, or one
            device of UCX for NIXL; empty for all, with NIXL for ``host``'s interface where that is known.
        host: the address of this node that peers use; or a network such as ``10.0.0.0/16`` or ``fd00::/64``,
            in which each machine of the node has one address.
        bind: where side channel and bootstrap port listen: an address, a network, ``0.0.0.0`` or ``::`` for
            all addresses; empty for ``host``.
        ranks: objects with ``host``, ``bind`` and ``device_name`` of some ranks, by rank, such as ``0``,
            ``4-7`` or ``0,8-9``. Numbers continue over data-parallel engines, as ports do.
        insecure: the side channel is neither authenticated nor encrypted, and handles are not signed; only
            where all of ``host`` and ``bind`` are loopback addresses.
        key_file: the secret that all nodes of a small cluster share (``kvconnect keys new``). Without
            ``key_file`` and ``keys_dir`` loopback nodes of one user share a key that the first one makes.
        keys_dir: the folder with a node's own key and its peers' public ones (``kvconnect keys node``).
        require_lane: what may carry bytes: ``nvlink``, ``cuda_ipc``, ``rdma``, ``tcp`` and ``shared_memory``,
            comma separated; empty for anything. A peer on another or an unknown lane is refused; its link is
            measured again within ``peer_timeout_s``.
        min_gb_per_s: a peer whose calibration is slower, in 10^9 bytes a second, is refused likewise; both
            hold for the node that sets them, either way.
        allow_peers: the only peers that this node fetches from: host, host:port, network, and network:ports
            such as ``10.0.0.0/24:14600-14607``; empty for every peer that a signed handle names. Also hosts
            of a peer's engine or other ranks, beside the one that it connects from.
        port: the side channel's port of rank 0; rank r listens on ``port + r``. 0 takes a free one.
        bootstrap_port: where a prefill node answers routers of Mooncake's protocol when they start; 0 for
            nowhere. Set ``port`` too, which routers keep.
        slot_bytes: size of a slot, a multiple of 4096; 0 for one that suits the device.
        num_slots: how many slots a worker has for each direction.
        convert_dtype: whether caches of unlike types (bfloat16, float16, fp8 e4m3) are converted, with the
            scales of the quantised side; both sides must set it.
        exponent_coding: whether bfloat16 KV travels in 0.764 of its bytes, restored bit for bit, between
            nodes that both have this setting: with ``auto`` over links that are so slow, by their
            calibration, that coding takes less time than it saves; with ``on`` over all links but shared
            memory. It takes the memory of one more slot.
        stream_min_tokens: prompts of so many tokens and more are sent while they are computed, where a router
            asked both nodes at once; 0 for never.
        lease_s: how long prefilled blocks wait to be fetched, unless the decode node renews the lease.
        lease_max_s: how long they wait at most, with renewals.
        drain_s: how long a stopping node sends what it was asked for; under vLLM ``--shutdown-timeout``
            decides, by default 0.
        warm_peers: ``host:port`` of prefill nodes, rank 0, that are met before any request names them.
        sources: ``host:port`` of nodes, rank 0, that are asked for the KV of requests without a handle: three
            at most for each, in order. They are met as ``warm_peers`` are; this node may be among them. A
            request may name others in ``kv_transfer_params.kv_sources``.
        share_prefix_cache: whether other nodes may fetch by name what this node's prefix cache has on the
            device, of requests that have ended.
        transfer_timeout_s: how long the engine may take for one batch.
        load_timeout_s: how long a load may take from order to arrival.
        peer_timeout_s: silence after which a peer counts as gone. It is asked after a quarter of that.
        max_inflight_bytes: most bytes under way to peers; an idle peer gets one batch even so.
        engine_options: passed to the engine's adapter as they are.
        receipts: whether every answer has a receipt of what served its prompt; a request may ask for one with
            `kvconnect_receipt` in `kv_transfer_params`.
        offload: keep blocks in host memory, on disk, or in a store; left out, nothing is kept.
    """

    engine: str = "auto"
    protocol: str = "auto"
    device_name: str = ""
    host: str = "127.0.0.1"
    bind: str = ""
    ranks: dict[str, RankConfig] = {}
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    bootstrap_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    insecure: bool = False
    key_file: str = ""
    keys_dir: str = ""
    require_lane: str = ""
    min_gb_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    allow_peers: tuple[str, ...] = ()
    slot_bytes: Annotated[int, msgspec.Meta(ge=0, multiple_of=4096)] = 0
    num_slots: Bound = 8
    convert_dtype: bool = False
    exponent_coding: Literal["off", "auto", "on"] = "off"
    stream_min_tokens: Size = 4096
    lease_s: Seconds = 30.0
    lease_max_s: Seconds = 600.0
    drain_s: Seconds = 30.0
    warm_peers: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    share_prefix_cache: bool = False
    transfer_timeout_s: Seconds = 30.0
    load_timeout_s: Seconds = 60.0
    peer_timeout_s: Seconds = 10.0
    max_inflight_bytes: Bound = 1 << 30
    engine_options: dict[str, Any] = {}
    receipts: bool = False
    offload: OffloadConfig | None = None

    def derived(self) -> ExtraConfig:
        """These settings, with the limits that follow from ``peer_timeout_s`` and others."""
        return msgspec.structs.replace(
            self,
            retry_max_s=self.peer_timeout_s,
            handshake_timeout_s=self.peer_timeout_s / 2,
            early_fetch_s=self.peer_timeout_s / 2,
            # Longer than any write that it waits for, one already begun by a library included: Mooncake
            # continues for up to 10 s with a batch that cannot be cancelled.
            quarantine_s=max(_LEAST_QUARANTINE_S, self.transfer_timeout_s * 4 / 3),
        )

    @property
    def lanes(self) -> frozenset[str]:
        """The lanes in ``require_lane``."""
        return frozenset(name.strip() for name in self.require_lane.split(",") if name.strip())

    def allows_lane(self, lane: str) -> bool:
        """Whether ``require_lane`` permits this lane."""
        return not self.require_lane or lane in self.lanes

    def of_rank(self, rank: int) -> ExtraConfig:
        """The settings of one rank; networks are not yet replaced by addresses."""
        rank += self.first_rank
        own = [one for key, one in self.ranks.items() if any(rank in named for named in ranks_of(key))]
        stated = {name: value for one in own for name, value in msgspec.structs.asdict(one).items() if value}
        return msgspec.structs.replace(self, ranks={}, **stated)

    def here(self, rank: int) -> ExtraConfig:
        """One rank's settings on this machine. Raises ``ConfigError``: it has no address in a network."""
        own, where = self.of_rank(rank), "kv_connector_extra_config"
        found = {name: address_within(getattr(own, name), f"{where}.{name}") for name in ("host", "bind")}
        return msgspec.structs.replace(own, **found)

    @property
    def place(self) -> str:
        """A rank's address, where it listens if that differs, and its devices, as a text for people."""
        listens = f", listening at {self.bind}" if self.bind not in ("", self.host) else ""
        return self.host + listens + (f", over {self.device_name}" if self.device_name else "")

    @property
    def listens_at(self) -> str:
        """Where one rank listens: ``bind``, or ``host`` without it."""
        return self.bind or self.host

    @property
    def far_addresses(self) -> list[str]:
        """The addresses in ``host`` and ``bind``, of any rank, that other machines may reach."""
        given = [
            self.host,
            self.bind,
            *(name for one in self.ranks.values() for name in (one.host, one.bind)),
        ]
        return [address for address in given if address and not is_loopback(address)]

    @property
    def all_engine_options(self) -> dict[str, Any]:
        """``engine_options``, with ``device_name`` among them where it is set."""
        named = {"device_name": self.device_name} if self.device_name else {}
        return {**named, **self.engine_options}


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_transfer_config`` as vLLM spells it."""

    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    kv_connector: Literal["KVConnect"] = CONNECTOR
    kv_connector_module_path: str | None = None
    engine_id: str = msgspec.field(default_factory=lambda: str(uuid.uuid4()))
    kv_buffer_device: Literal["cpu", "cuda"] | None = None
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    kv_connector_extra_config: ExtraConfig = ExtraConfig()

    @property
    def extra(self) -> ExtraConfig:
        """Short for ``kv_connector_extra_config``."""
        return self.kv_connector_extra_config

    @property
    def is_producer(self) -> bool:
        """This node may prefill for others."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_consumer(self) -> bool:
        """This node may fetch from others."""
        return self.kv_role in ("kv_consumer", "kv_both")


def parse_kv_transfer_config(source: str | bytes | Mapping[str, Any]) -> TransferConfig:
    """Read a ``kv_transfer_config`` from its JSON text, or from the object itself.

    Raises ``ConfigError``: it is not valid; the text names the key, the value and the accepted values of
    every mistake.
    """
    given = source if isinstance(source, Mapping) else json_object(source, "kv_transfer_config")
    # vLLM writes its unset fields as null.
    known = TransferConfig.__struct_fields__
    given = {key: value for key, value in given.items() if value is not None or key not in known}
    mistakes: list[str] = []
    if isinstance(extra := given.get("kv_connector_extra_config"), Mapping) and "path" in extra:
        given["kv_connector_extra_config"] = {key: value for key, value in extra.items() if key != "path"}
        mistakes.append(
            f"kv_connector_extra_config.path is {extra['path']!r}, and is no setting any more: pages travel "
            "through slots, as with 'packed', and no peer writes to the cache; leave it out"
        )
    read = read_what_can_be(given, TransferConfig, "kv_transfer_config", mistakes, Limits.__struct_fields__)
    mistakes += _mistakes(read)
    refuse(mistakes)
    extra, offload = read.extra.derived(), read.extra.offload
    is_asked = read.is_producer and extra.engine != "none"
    if is_asked and offload is not None and offload.disk_path and offload.peer_share is None:
        extra = msgspec.structs.replace(extra, offload=msgspec.structs.replace(offload, peer_share=1 / 16))
    return msgspec.structs.replace(read, kv_connector_extra_config=extra)


def _mistakes(config: TransferConfig) -> Iterator[str]:
    """Settings that cannot be used, or not with one another. Of those that could not be read: no more."""
    extra = config.extra
    where = "kv_connector_extra_config"
    if extra.engine != "none":
        yield from engine_mistakes(extra.engine, f"{where}.engine")
    elif extra.offload is None:
        yield (
            f"{where}.engine is 'none' and there is no offload, which leaves nothing to do; accepted: an "
            f"engine ({', '.join(('auto', *engine_entry_points()))}), or offload with at least cpu_bytes"
        )
    yield from _rank_mistakes(extra.ranks, f"{where}.ranks")
    if found := {extra.host, *(one.host or extra.host for one in extra.ranks.values())}.intersection(ANY):
        yield (
            f"{where}.host is {found.pop()!r}, which peers cannot connect to; set the address that they "
            "reach this node on, and bind for where it listens"
        )
    yield from _security_mistakes(extra, where)
    if extra.offload is not None:
        yield from _offload_mistakes(extra.offload)
    lanes = [lane for lane in get_args(LaneKind) if lane != "unknown"]
    if unknown := sorted(extra.lanes - set(lanes)):
        yield f"{where}.require_lane has {', '.join(unknown)}; accepted: {', '.join(lanes)}"
    if extra.lease_max_s < extra.lease_s:
        least = f"it must be at least lease_s, which is {extra.lease_s}"
        yield f"{where}.lease_max_s is {extra.lease_max_s}, {least}"
    for name in ("warm_peers", "sources"):
        for address in getattr(extra, name):
            if split_address(address) is None:
                yield f"{where}.{name} names {address!r}, accepted: host:port"
    if extra.sources and (config.kv_role == "kv_producer" or extra.engine == "none"):
        yield (
            f"{where}.sources is set and this node fetches nothing; accepted: kv_role kv_consumer or "
            "kv_both, and an engine"
        )
    if extra.share_prefix_cache and (config.kv_role == "kv_consumer" or extra.engine == "none"):
        yield (
            f"{where}.share_prefix_cache is true and this node sends nothing; accepted: kv_role kv_producer "
            "or kv_both, and an engine"
        )
    if extra.load_timeout_s < extra.peer_timeout_s / 2:
        yield (
            f"{where}.load_timeout_s is {extra.load_timeout_s}, it must be at least half of peer_timeout_s, "
            f"which is {extra.peer_timeout_s}: as long as a first greeting may take"
        )
    if not config.engine_id:
        yield "kv_transfer_config.engine_id is empty; leave it out for a random one"


def _security_mistakes(extra: ExtraConfig, where: str) -> Iterator[str]:
    given = [name for name in ("insecure", "key_file", "keys_dir") if getattr(extra, name)]
    if len(given) > 1:
        yield f"{where} has {' and '.join(given)}; accepted: one of them"
    if extra.insecure and (far := extra.far_addresses):
        yield (
            f"{where}.insecure is true, and host or bind is {far[0]!r}; accepted: loopback addresses. For "
            "any other make a key with `kvconnect keys new` and give it as key_file"
        )
