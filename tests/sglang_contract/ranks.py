"""Ranks of SGLang servers in this process: pools as SGLang allocates them, and the rooms that use them.

What lies below is real: worker halves with their threads, side channels, and the memory engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvconnect.config import parse_kv_transfer_config
from kvconnect.halves.building import build_worker_half
from kvconnect.halves.rank_traits import RankTraits, SentCache
from kvconnect.peer.messages import CacheMeaning
from kvconnect.sglang.rank_pools import RankShape, read_pools
from kvconnect.sglang.room_ledger import (
    FAILED,
    SUCCESS,
    WAITING_FOR_INPUT,
    DecodeRoom,
    PrefillRoom,
    RoomLedger,
)
from kvconnect.transfer.attached_rows import AttachedRows
from tests.identities import named

PAGE, LAYERS, HEADS, WIDTH = 4, 3, 2, 8
PATIENCE_S = 20.0
AUX = (64, 16, 1000)


class Rank:
    """One rank of a server; ``pages`` without the dummy page 0. Pools are filled with ``fill`` and up."""

    def __init__(
        self,
        role: str,
        pages: int,
        *,
        rank: int = 0,
        size: int = 1,
        heads: int | None = HEADS,
        layers: int = LAYERS,
        draft_layers: int = 0,
        swa_pages: int = 0,
        slots: int = 0,
        dsa: bool = False,
        page: int = PAGE,
        directory: Sequence[Any] = (),
        model: str = "m",
        engine_id: str = "",
        timeout_s: float = 60.0,
        aux: Sequence[int] = AUX,
        **extra: Any,
    ) -> None:
        self.page = page
        own = None if heads is None else heads // size
        planes, width = (1, WIDTH) if own is None else (2, own * WIDTH)
        self.kv = [torch.zeros(pages + 1, page, width, dtype=torch.float32) for _ in range(planes * layers)]
        self.kv += [torch.zeros(pages + 1, page, width) for _ in range(planes * draft_layers)]
        self.swa = [torch.zeros(swa_pages + 1, page, width) for _ in range(2 * 2 * bool(swa_pages))]
        self.slots = [torch.zeros(slots + 1, 5, dtype=torch.float16) for _ in range(3 * bool(slots))]
        self.dsa = [torch.zeros(pages + 1, page * 3, dtype=torch.uint8) for _ in range(layers * dsa)]
        self.aux = [torch.zeros(8, one, dtype=torch.uint8) for one in aux]
        states = [
            (kind, pool)
            for kind, pool in zip(("swa", "mamba", "dsa"), (self.swa, self.slots, self.dsa), strict=True)
            if pool
        ]
        self.args = SimpleNamespace(
            **_infos("kv", self.kv),
            **_infos("aux", self.aux),
            page_size=page,
            num_draft_entries=planes * draft_layers,
            kv_layer_ids=[],
            state_types=[kind for kind, _ in states],
            swa_kv_cache_layout="nhd" if swa_pages else None,
            **{
                f"state_{name}": [_infos("s", pool)[f"s_{name}"] for _, pool in states]
                for name in ("data_ptrs", "data_lens", "item_lens")
            },
        )
        self.pools = read_pools(self.args, RankShape(heads, rank, size, layers, torch.float32))
        config = parse_kv_transfer_config(
            {
                "kv_role": role,
                "engine_id": engine_id or f"{role} {id(self)}",
                "kv_connector_extra_config": {
                    "engine": "memory",
                    "insecure": True,
                    "slot_bytes": 4096,
                    **extra,
                },
            }
        )
        meaning = CacheMeaning(named(model), heads, size, draft_from=self.pools.draft_from)
        traits = RankTraits(rank, size, sent=SentCache(self.pools.cache, meaning), reports_fetches=True)
        self.worker = build_worker_half(config, traits)
        address = self.worker.address()
        assert address is not None
        self.address = address
        self.know_ranks((address, *directory))
        self.ledger = RoomLedger(
            self.worker,
            self.pools,
            AttachedRows(self.args.aux_data_ptrs, self.args.aux_item_lens),
            bootstrap_timeout_s=timeout_s,
            clock=time.monotonic,
            replicated=heads is None and size > 1,
        )

    def know_ranks(self, directory: Sequence[Any]) -> None:
        self.worker.transfer.know_ranks(sorted(directory, key=lambda address: address.rank))

    def fill(self, seed: int) -> None:
        """Give every page, slot and row its own content."""
        generator = torch.Generator().manual_seed(seed)
        for pool in (*self.kv, *self.swa, *self.slots):
            pool.copy_(torch.randn(pool.shape, generator=generator))
        for pool in (*self.dsa, *self.aux):
            pool.copy_(torch.randint(1, 256, pool.shape, generator=generator, dtype=torch.uint8))

    def room(self, number: int, prefill: Rank) -> DecodeRoom:
        """A request at D, whose prefill node is found at once."""
        found: Future[Any] = Future()
        found.set_result((prefill.address.host, prefill.address.port))
        return self.ledger.open_decode(number, found)

    def close(self) -> None:
        self.worker.close()


def _infos(name: str, pools: Sequence[torch.Tensor]) -> dict[str, list[int]]:
    return {
        f"{name}_data_ptrs": [pool.data_ptr() for pool in pools],
        f"{name}_data_lens": [pool.nbytes for pool in pools],
        f"{name}_item_lens": [pool[0].nbytes for pool in pools],
    }


def until(condition: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, what or "it did not come true in time"
        time.sleep(0.002)
    return found


def ended(rank: Rank, room: PrefillRoom | DecodeRoom) -> int:
    """Poll a room until it has ended, as SGLang's loop does."""
    poll = rank.ledger.poll_prefill if isinstance(room, PrefillRoom) else rank.ledger.poll_decode
    until(lambda: poll(room) in (FAILED, SUCCESS), f"{room} did not end")
    return room.state


def asked(prefill: Rank, room: PrefillRoom) -> None:
    """Poll P's room until D has asked for it."""
    until(lambda: prefill.ledger.poll_prefill(room) == WAITING_FOR_INPUT, f"{room} was not asked for")


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)
