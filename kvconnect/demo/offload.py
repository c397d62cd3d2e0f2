"""The demo's other part: one node whose prompts come back when its pool was overwritten, or it restarted."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.demo.children import Child, Children
from kvconnect.demo.http import BadAnswer, fetch_json
from kvconnect.demo.outcome import Tokens, judge_tokens, tokens_of
from kvconnect.demo.pair import ask, ask_all
from kvconnect.demo.prompts import make_prompts
from kvconnect.demo.report import Finding, judging, known, report

# Blocks of each model's pool, so that the prompts below do not fit into it together.
POOLS = {"gqa": 64, "mla": 64, "mixed": 12, "sliding": 160, "hybrid": 40}
_BLOCK_TOKENS = {"mixed": 128, "hybrid": 32}
_USUAL_BLOCK_TOKENS = 16
_SEED = 23
# Of the demo's prompts these are long enough for whole blocks of every model.
_RETURNING = (4, 7, 11)
_OTHERS = (3, 9, 11, 14)
_TIER_BYTES = 64 << 20
_STOP_TIMEOUT_S = _SETTLE_TIMEOUT_S = 20.0


@dataclass(kw_only=True)
class Returned(Finding):
    """Tokens found of those that could be, from memory and after a restart."""

    prompts: int
    could_be_found: int = 0
    from_memory: int = 0
    from_disk: int = 0

    @property
    def name(self) -> str:
        """See ``Finding``."""
        return f"offload/{self.model}"

    def summary(self) -> str:
        """See ``Finding``."""
        found = f"memory {self.from_memory}, disk {self.from_disk} of {self.could_be_found}"
        return f"{self.token_exact} of {2 * self.prompts} exact; {found}"


def run_offload(*, models: Sequence[str], json_output: bool, node_options: Sequence[str] = ()) -> int:
    """Show it with each of these models, none for all. Returns the exit code: 1 if anything was wrong.

    Raises:
        ConfigError: there is no such model.
    """
    chosen = known("model", models, tuple(POOLS))

    def run(folder: Path) -> Iterator[Finding]:
        for model in chosen:
            outcome = Returned(model=model, prompts=len(_RETURNING))
            with judging(outcome, folder) as children:
                _run(outcome, children, folder / f"kept-{model}", node_options)
            yield outcome

    return report(run, json_output=json_output)


def _run(outcome: Returned, children: Children, disk: Path, node_options: Sequence[str]) -> None:
    model = outcome.model
    made = make_prompts(max(_RETURNING) + 1, _SEED)
    prompts = [made[index] for index in _RETURNING]
    other = make_prompts(max(_OTHERS) + 1, _SEED + 1)
    size = _BLOCK_TOKENS.get(model, _USUAL_BLOCK_TOKENS)
    outcome.could_be_found = sum((len(prompt) - 1) // size * size for prompt in prompts)
    plain = children.start("plain", "serve", "--model", model, "--port", "0", *node_options)
    node = _start(children, "first", model, disk, node_options)
    expected = ask_all(plain.wait_ready(), model, prompts)
    url = node.wait_ready()
    _ask(outcome, url, prompts, expected)
    outcome.token_exact = 0
    ask_all(url, model, [other[index] for index in _OTHERS])
    outcome.from_memory = _ask(outcome, url, prompts, expected)
    node.end(_STOP_TIMEOUT_S)
    again = _start(children, "again", model, disk, node_options)
    url = again.wait_ready()
    _wait_settled(url)
    outcome.from_disk = _ask(outcome, url, prompts, expected)
    for where, found in (("memory", outcome.from_memory), ("disk after a restart", outcome.from_disk)):
        if found != outcome.could_be_found:
            outcome.problems.append(
                f"{found} tokens were found in {where}, {outcome.could_be_found} were kept"
            )


def _start(children: Children, name: str, model: str, disk: Path, node_options: Sequence[str]) -> Child:
    """A node that keeps blocks, and whose own pool does not serve a prompt that comes back."""
    offload = {"cpu_bytes": _TIER_BYTES, "disk_path": str(disk), "disk_bytes": _TIER_BYTES}
    config = {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "none", "offload": offload}}
    pool = ("--num-blocks", str(POOLS[model]), "--no-enable-prefix-caching")
    serve = ("serve", "--model", model, "--port", "0", "--kv-transfer-config", json.dumps(config))
    return children.start(f"{name}-{model}", *serve, *pool, *node_options)


def _wait_settled(url: str) -> None:
    """Until a node has looked through what is on its disk."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while any((state := fetch_json(url + "/debug/state"))["offload"]["busy"].values()):
        if time.monotonic() > deadline:
            raise BadAnswer(f"{url} did not come to rest: {state['offload']}")
        time.sleep(0.05)


def _ask(
    outcome: Returned, url: str, prompts: Sequence[Sequence[int]], expected: Sequence[Tokens | BadAnswer]
) -> int:
    """Ask for all prompts, one after the other, and judge the tokens. Returns how many were found."""
    answers = [ask(url, outcome.model, prompt) for prompt in prompts]
    judge_tokens(outcome, prompts, [tokens_of(answer) for answer in answers], expected)
    return sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
