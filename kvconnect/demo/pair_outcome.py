"""What the demo found, and the rules by which it is right or wrong. Pure: no process, no socket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvconnect.demo.http import BadAnswer, Samples, growth


@dataclass(frozen=True, slots=True)
class Tokens:
    """What was generated for one prompt; ``draft`` is None for a model without a draft."""

    token_ids: list[int]
    draft: list[int] | None


@dataclass(kw_only=True)
class PairOutcome:
    """What one engine with one model did. ``gb_per_s`` are received bytes by seconds of their transfers.

    ``problems`` is empty exactly if everything was as it must be.
    """

    engine: str
    model: str
    requests: int
    token_exact: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    kv_bytes: int = 0
    transfer_s: float = 0.0
    gb_per_s: float = 0.0
    lane: str = ""
    block_ids_differ: bool = False

    @property
    def name(self) -> str:
        """What ran."""
        return f"{self.engine}/{self.model}"

    def summary(self) -> str:
        """What was found, in words."""
        moved = f"{self.kv_bytes / 1e6:.3g} MB over {self.lane}" if self.lane else "no KV came"
        return f"{self.token_exact} of {self.requests} exact, {moved}"


def tokens_of(answer: Any) -> Tokens:
    """The generated tokens in an answer. Raises BadAnswer: it holds none."""
    try:
        drafts = answer.get("draft_token_ids")
        return Tokens(list(answer["choices"][0]["token_ids"]), None if drafts is None else list(drafts))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise BadAnswer(f"an answer without token ids: {str(answer)[:200]}") from error


def difference(pair: Tokens | BadAnswer, single: Tokens | BadAnswer) -> str:
    """How the pair's tokens differ from the single node's; empty if they are the same."""
    for name, answer in (("single node", single), ("pair", pair)):
        if isinstance(answer, BadAnswer):
            return f"the {name} failed: {answer}"
        if not answer.token_ids:
            return f"the {name} generated nothing"
    assert not isinstance(pair, BadAnswer)
    assert not isinstance(single, BadAnswer)
    if pair.token_ids != single.token_ids:
        return f"tokens {_first_difference(pair.token_ids, single.token_ids)}"
    if pair.draft != single.draft:
        return f"draft tokens {_first_difference(pair.draft or [], single.draft or [])}"
    return ""


def judge_tokens(
    outcome: PairOutcome,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Tokens | BadAnswer],
    expected: Sequence[Tokens | BadAnswer],
) -> None:
    """Count the prompts with the tokens of a single node, and note how the others differ."""
    for index, (prompt, mine, single) in enumerate(zip(prompts, answers, expected, strict=True)):
        if problem := difference(mine, single):
            outcome.problems.append(f"prompt {index} of {len(prompt)} tokens: {problem}")
        else:
            outcome.token_exact += 1


def _first_difference(pair: Sequence[int], single: Sequence[int]) -> str:
    missing = "nothing"
    both = itertools.zip_longest(pair, single, fillvalue=missing)
    place, (mine, theirs) = next((i, ab) for i, ab in enumerate(both) if ab[0] != ab[1])
    return f"differ at place {place}: {mine} from the pair, {theirs} from the single node"


def judge_transfer(
    outcome: PairOutcome, before: Samples, after: Samples, prompts: Sequence[Sequence[int]]
) -> None:
    """A pair that computes everything twice is exact too: only the counters differ."""
    received = {"direction": "received"}
    outcome.kv_bytes = int(growth(before, after, "kvconnect_transfer_bytes_total", **received))
    outcome.transfer_s = growth(before, after, "kvconnect_transfer_seconds_total", **received)
    if outcome.transfer_s > 0:
        outcome.gb_per_s = round(outcome.kv_bytes / outcome.transfer_s / 1e9, 6)
    moved = {pair for pair in after if pair[0] == "kvconnect_transfer_bytes_total"}
    grown = [dict(labels) for name, labels in moved if after[name, labels] > before.get((name, labels), 0.0)]
    outcome.lane = "+".join(sorted({one["lane"] for one in grown if one["direction"] == "received"}))
    count = growth(before, after, "kvconnect_transfers_total", outcome="ok", **received)
    wrong = growth(before, after, "kvconnect_transfers_total", **received) - count
    # What one token leaves behind may be cheaper to compute than to fetch.
    needed = sum(len(prompt) > 1 for prompt in prompts)
    if count < needed:
        outcome.problems.append(
            f"{needed} prompts need KV of the prefill node, but {count:.0f} received some"
        )
    if wrong:
        outcome.problems.append(f"{wrong:.0f} transfers failed")
    if needed and not (outcome.kv_bytes > 0 and outcome.transfer_s > 0):
        outcome.problems.append(f"{outcome.kv_bytes} bytes in {outcome.transfer_s} s were received")


def all_differ(prefill: Any, decode: Any) -> bool:
    """In every cache group that holds blocks on both sides the ids differ, and there is such a group."""
    if not isinstance(prefill, list) or not isinstance(decode, list) or len(prefill) != len(decode):
        return False
    shared = [(a[: len(b)], b[: len(a)]) for a, b in zip(prefill, decode, strict=True)]
    held = [(theirs, mine) for theirs, mine in shared if any(theirs) and any(mine)]
    return bool(held) and all(theirs != mine for theirs, mine in held)
