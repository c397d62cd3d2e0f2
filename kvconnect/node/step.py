"""One step of the engine loop as a value: what the scheduler decided and the runner executes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.node.blocks import Grown

BlockIds = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Chunk:
    """Tokens of one request to compute. ``samples``: they reach the end, so the next token is wanted."""

    request_id: str
    row: int
    start: int
    token_ids: Sequence[int]
    samples: bool


@dataclass
class Step:
    """Work of one step.

    Attributes:
        zero_blocks: fresh blocks of state groups, by group: a recurrence begins at zero.
        new_block_ids_to_zero: fresh blocks of attention groups whose old bytes could be NaN; blocks that a
            load fills whole are not among them.
        released_rows: block table rows that no request owns any more.
        new_rows, grown_rows: logical block ids per group that start a row anew, or add to it.
        deferred: a request waits for an answer of the connector, so the next step must come soon.
    """

    chunks: list[Chunk] = field(default_factory=list)
    zero_blocks: list[tuple[int, list[int]]] = field(default_factory=list)
    new_block_ids_to_zero: list[int] = field(default_factory=list)
    released_rows: list[int] = field(default_factory=list)
    new_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    grown_rows: list[tuple[int, BlockIds]] = field(default_factory=list)
    deferred: bool = False

    def add_fresh(self, grown: Grown) -> None:
        """Add an allocation's blocks to those that are zeroed."""
        self.zero_blocks += grown.zero_blocks
        self.new_block_ids_to_zero += grown.new_block_ids_to_zero
