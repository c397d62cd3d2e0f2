"""A completion request as the node's engine sees it, what its client gets, and the steps that compute it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconnect.config import FIRST_TOKEN_KEY
from kvconnect.node.block_manager import RequestBlocks


@dataclass(frozen=True)
class Failure:
    """Why a request ended without its tokens. ``status`` is an HTTP status code."""

    status: int
    message: str
    kind: str


@dataclass(frozen=True)
class Output:
    """New tokens of a request, and its end if ``finish_reason`` or ``failure`` is set.

    ``draft_token_ids`` are the draft model's proposals, None for a model without one.
    ``kv_block_ids`` are the request's logical blocks by group when it ended.
    """

    token_ids: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    kv_block_ids: tuple[list[int], ...] | None = None
    cached_tokens: int = 0

    @property
    def is_last(self) -> bool:
        """Nothing follows."""
        return self.finish_reason is not None or self.failure is not None


class RequestState(enum.Enum):
    """Where a request is. FINISHED requests may still hold blocks that a peer reads or writes."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One completion. ``sink`` is called on the engine loop thread and must not block.

    ``num_computed_tokens`` counts the tokens whose cache is valid, ``row`` is its place in the block
    tables while it runs. ``loaded``: its blocks were filled by a transfer, until it begins anew.
    ``preemptions`` counts how often it began anew. ``checkpoints`` are numbers of tokens at which
    a chunk of it has to end.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    sink: Callable[[Output], None]
    kv_transfer_params: Mapping[str, Any] | None = None
    session_id: str | None = None
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    blocks: RequestBlocks | None = None
    row: int | None = None
    loaded: bool = False
    preemptions: int = 0
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens so far: the prompt as far as it is used, and what was generated."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_token(self) -> int | None:
        """What its output begins with, if that is named and there is none yet."""
        token = (self.kv_transfer_params or {}).get(FIRST_TOKEN_KEY)
        return token if isinstance(token, int) and not self.num_generated_tokens else None

    def truncate(self, num_prompt_tokens: int) -> None:
        """Use only the first tokens of the prompt. Before anything was computed."""
        self.num_prompt_tokens = min(num_prompt_tokens, self.num_prompt_tokens)
        self.token_ids = self.prompt_token_ids[: self.num_prompt_tokens]


BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one request to compute. ``samples``: they reach the end, so the next token is wanted."""

    request_id: str
    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool


@dataclass
class EngineStep:
    """Work of one step.

    Attributes:
        new_block_ids_to_zero: fresh blocks of attention groups, whose old bytes could be NaN; blocks that a
            load fills whole are not among them.
        released_rows: block table rows that no request owns any more.
        new_rows, grown_rows: logical block ids per group that start a row anew, or add to it.
        deferred: a request waits for an answer of the connector, so the next step must come soon.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    new_block_ids_to_zero: list[int] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    new_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    grown_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    deferred: bool = False
