"""What is kept below the device's memory, and where: the part ``offload`` of the configuration."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError

_OFFLOAD = "kv_connector_extra_config.offload"
_LEAST_DISK_BYTES = 1 << 20

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Bound = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class OffloadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``kv_connector_extra_config.offload``: memory below the device's, in which blocks are kept for later.

    All sizes are those of one worker rank.

    Attributes:
        cpu_bytes: host memory for blocks.
        shares: which part of ``cpu_bytes`` is for the blocks of each cache group, by group; empty for shares
            by what a prompt of usual length leaves in each. Groups whose blocks are equally long use theirs
            together.
        decoded: whether blocks that were filled while decoding are kept too.
        checkpoint_tokens: windows and states are kept at the end of a prompt and of an answer, and every so
            many tokens of a prompt in between; 0 for never in between.
        min_tokens: fewer tokens than this are computed again rather than restored.
        wait_s: how long a request waits for what lower tiers have.
        disk_path: a folder for blocks on disk; empty for none. Ranks and models have their own folders in it.
        disk_bytes: most bytes on disk, at least 1 MiB with ``disk_path``; nothing ever takes more. What other
            models have left in the folder and no process uses now counts too, and makes room first.
        max_queued_bytes: most bytes that wait to be written to lower tiers; what is more is not written.
        store: the address ``host:port`` of a Mooncake Store master; empty for no shared tier.
        store_metadata: the metadata server of that store.
        store_protocol: how the store is reached: ``tcp`` or ``rdma``.
        store_bytes: memory that this rank gives to the store.
        salt: nothing that was kept under another salt is found.
        pin_quota: which part of host memory, and of the disk, one tenant's sessions may pin; 0 for none. All
            together may pin three quarters.
        peer_share: which part of ``cpu_bytes`` is for what is read from disk when peers fetch it; with 0 they
            get nothing from there. Left out it is a sixteenth on a node with a disk that peers may ask.
        tenant_key: the key of ``kv_transfer_params`` that names a tenant; empty for the ``cache_salt``.
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


def check_offload(offload: OffloadConfig) -> None:
    """Raises ``ConfigError``: two settings do not go together."""
    if sum(offload.shares) > 1 + 1e-9:
        raise ConfigError(
            f"{_OFFLOAD}.shares is {list(offload.shares)}, which adds up to {sum(offload.shares):g}; "
            "accepted: numbers above 0 that add up to at most 1"
        )
    for name, of in (("disk_bytes", "disk_path"), ("store_bytes", "store")):
        if (value := getattr(offload, name)) and not getattr(offload, of):
            raise ConfigError(
                f"{_OFFLOAD}.{name} is {value} and there is no {of}; accepted: both, or neither"
            )
    if offload.disk_path and offload.disk_bytes < _LEAST_DISK_BYTES:
        least = f"with disk_path it must be at least {_LEAST_DISK_BYTES}"
        raise ConfigError(f"{_OFFLOAD}.disk_bytes is {offload.disk_bytes}, {least}")
    if offload.store and split_address(offload.store) is None:
        raise ConfigError(f"{_OFFLOAD}.store is {offload.store!r}, accepted: host:port, and '' for no store")
    if offload.store and not offload.store_metadata:
        accepted = "accepted: P2PHANDSHAKE, or the address of a metadata server"
        raise ConfigError(f"{_OFFLOAD}.store_metadata is empty; {accepted}")
