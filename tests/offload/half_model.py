"""What a cache group, a device and a request are in miniature: contents in place of bytes.

``chain[n]`` of a request is a digest of its first ``n`` tokens; a slot of a block holds the digest of all
tokens that its bytes would depend on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvconnect.cache.specs import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheGroup,
    SlidingWindowSpec,
    StateSpec,
)
from tests.offload.half_ranks import GARBAGE

CAP = 4096
ROW_BYTES = 64
ROOT = 17
"""The digest of no tokens."""


@dataclass(frozen=True)
class Kind:
    """A cache group: ``tokens`` per block, what it sees, and whether it is a draft model's."""

    tokens: int
    window: int | None = None
    is_state: bool = False
    is_draft: bool = False
    row_bytes: int = ROW_BYTES
    chunk: int | None = None

    def spec(self) -> KVCacheGroup:
        name = (f"{id(self)}",)
        if self.is_state:
            return KVCacheGroup(name, StateSpec(CAP, ((1,),), (torch.int8,)))
        if self.window is not None:
            return KVCacheGroup(
                name, SlidingWindowSpec(self.tokens, 1, 1, torch.int8, sliding_window=self.window)
            )
        if self.chunk is not None:
            return KVCacheGroup(
                name, ChunkedLocalSpec(self.tokens, 1, 1, torch.int8, chunk_tokens=self.chunk)
            )
        return KVCacheGroup(name, FullAttentionSpec(self.tokens, 1, 1, torch.int8))

    def reads(self, position: int, boundary: int) -> bool:
        """Whether token ``boundary`` needs this block."""
        end = (position + 1) * self.tokens
        if end > boundary or self.is_state:
            return self.is_state and end == boundary
        return end > self.first_seen(boundary)

    def first_seen(self, token: int) -> int:
        """The first token that computing ``token`` reads."""
        if self.chunk is not None:
            return token - token % self.chunk
        return 0 if self.window is None else max(0, token - self.window + 1)

    def first_read(self, token: int) -> int:
        """The first position that computing ``token`` reads or writes."""
        return self.first_seen(token) // self.tokens


class Device:
    """Blocks of one pool, which groups use in turn: what one of them writes, another one has lost."""

    def __init__(self) -> None:
        self._held: dict = {}

    def get(self, key, default=GARBAGE):
        group, held = self._held.get(key[1], (key[0], default))
        return held if group == key[0] else GARBAGE

    def __getitem__(self, key):
        return self.get(key)

    def __setitem__(self, key, held) -> None:
        self._held[key[1]] = key[0], held

    def forget(self) -> None:
        self._held.clear()


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Req:
    """A request. ``chain[n]`` is the digest of its first ``n`` tokens."""

    request_id: str
    tokens: list[int]
    max_new: int
    kv_transfer_params: dict | None = None
    chain: list[int] = field(default_factory=lambda: [ROOT])
    state: str = "waiting"
    computed: int = 0
    loaded: bool = False
    ids: list[list[int]] = field(default_factory=list)
    told: int = 0
    hits: list[tuple[int, int]] = field(default_factory=list)
    waits: int = 0
    guessed: int = 0
    names: dict[int, list[bytes]] = field(default_factory=dict)
    noted: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.extend(())

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def extend(self, tokens) -> None:
        self.tokens.extend(tokens)
        while len(self.chain) <= len(self.tokens):
            self.chain.append(hash((self.chain[-1], self.tokens[len(self.chain) - 1])))

    def hashes(self, size: int) -> list[bytes]:
        names = self.names.setdefault(size, [])
        for end in range(size * (len(names) + 1), len(self.tokens) + 1, size):
            names.append(name_of(self.chain[end]))
        return names

    def slots(self, kind: Kind, position: int):
        """What a whole block should hold."""
        if kind.is_state:
            return self.chain[(position + 1) * kind.tokens]
        first = position * kind.tokens + 1 + kind.is_draft
        return tuple(self.chain[first : first + kind.tokens])


def chained(before: bytes, tokens: list[int]) -> bytes:
    """The name after a few tokens more."""
    digest = int.from_bytes(before, "little", signed=True)
    for token in tokens:
        digest = hash((digest, token))
    return name_of(digest)


def name_of(digest: int) -> bytes:
    return (digest & (1 << 64) - 1).to_bytes(8, "little")
