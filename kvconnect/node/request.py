"""A completion request in the node's engine, the outputs for its client, and the steps that compute it."""

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


@dataclass(frozen=True)
class Output:
    """New tokens of a request, and its end if ``finish_reason`` or ``failure`` is set.

    ``draft_token_ids`` are the draft model's proposals, None for a model without one.
    """

    token_ids: tuple[int, ...] = ()
    draft_token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    cached_tokens: int = 0

    @property
    def is_last(self) -> bool:
        """Whether no output follows."""
        return self.finish_reason is not None or self.failure is not None


class RequestState(enum.Enum):
    """A request's state. The last two have ended, and a transfer still reads or writes their blocks."""

    WAITING = "waiting"
    WAITING_FOR_KV = "waiting_for_kv"
    RUNNING = "running"
    FINISHED = "finished"
    WAITING_TO_BE_FETCHED = "waiting_to_be_fetched"
    ABORTED_WHILE_LOADING = "aborted_while_loading"


@dataclass(eq=False)
class Request:
    """One completion. ``sink`` is called on the engine loop's thread and must not block.

    The scheduler gives it ``blocks`` when it takes it.
    ``num_computed_tokens`` counts the tokens whose KV is valid; ``row`` is its row in the block tables while
    it runs. ``loaded``: a transfer filled its blocks, and it has not started over since. ``preemptions``
    counts how often it started over. A chunk must end at each of ``checkpoints``, in tokens.
    """

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int
    sink: Callable[[Output], None]
    kv_transfer_params: Mapping[str, Any] | None = None
    session_id: str | None = None
    cache_salt: str | None = None
    state: RequestState = RequestState.WAITING
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    cached_tokens: int = 0
    blocks: RequestBlocks = field(init=False)
    row: int | None = None
    loaded: bool = False
    preemptions: int = 0
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far: the used part of the prompt, and generated tokens."""
        return len(self.token_ids)

    @property
    def num_generated_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_token(self) -> int | None:
        """The first output token that the router named; None if it named none or the output has begun."""
        token = (self.kv_transfer_params or {}).get(FIRST_TOKEN_KEY)
        return token if isinstance(token, int) and not self.num_generated_tokens else None

    def truncate(self, num_prompt_tokens: int) -> None:
        """Use only the first tokens of the prompt. Call it before any token is computed."""
        self.num_prompt_tokens = min(num_prompt_tokens, self.num_prompt_tokens)
        self.token_ids = self.prompt_token_ids[: self.num_prompt_tokens]


BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one request to compute. ``samples``: they reach its end, so a new token is sampled."""

    request_id: str
    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool


@dataclass
class EngineStep:
    """The work of one step.

    Attributes:
        new_block_ids_to_zero: fresh blocks of attention groups, whose old bytes could be NaN; without blocks
            that a load fills whole.
        new_rows, grown_rows: (row, logical block ids per group) that start a row over, or extend it.
        deferred: a request waits for the connector's answer, so the next step must come soon.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    new_block_ids_to_zero: list[int] = field(default_factory=list)
    new_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    grown_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    deferred: bool = False
