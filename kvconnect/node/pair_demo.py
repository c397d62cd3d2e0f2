"""The demo: proof on this machine that a P/D pair decodes the same tokens as a single node.

It starts real processes through the command line, as an operator would, and checks them over HTTP.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

from kvconnect.errors import ConfigError, KVConnectError
from kvconnect.node.children import BadAnswer, Child, Children, Samples, fetch_json, growth, read_metrics
from kvconnect.packages import engine_entry_points

MODELS = ("gqa", "mla", "mixed", "sliding", "hybrid")
PROTOCOLS = {"mooncake": "tcp", "nixl": "UCX"}
"""By engine, for nodes with CPU caches: with ``auto`` two nodes of one machine need no engine."""
# The decode node never uses these ids, so that both nodes cannot have equal ids by accident.
RESERVED_BLOCKS = 61

PROMPT_SEED, VOCAB = 7, 512
# One token; less than a block; exact blocks of 16, 32 and 128; one token more than those; several hundred.
_LENGTHS = (1, 9, 16, 129, 333, 128, 32, 257, 64, 150, 15, 480, 2, 17, 384, 96)
# Every so many prompts share a beginning, which may already be cached.
_SHARED_EVERY, _SHARED_TOKENS = 4, 128
MAX_TOKENS = 12
CONCURRENCY = 4
REQUEST_TIMEOUT_S, IDLE_TIMEOUT_S, READY_TIMEOUT_S = 90.0, 45.0, 15.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of ``kvconnect demo``. Raises ``ConfigError`` if no prompt would be sent."""

    engine: Annotated[
        list[str],
        "Engine to run, exit 2 if it cannot (several times for several); default: every one that works here.",
    ] = field(default_factory=list)
    model: Annotated[list[str], "Model to run (several times for several); default: all."] = field(
        default_factory=list
    )
    requests: Annotated[int, "Prompts per engine and model."] = 8
    device: Annotated[str, "Where the nodes compute: cpu, cuda, cuda:N."] = "cpu"
    kv_cache_dtype: Annotated[str, "What the nodes' caches keep: auto, bf16 or fp8_e4m3."] = "auto"

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ConfigError(f"requests is {self.requests}, it must be at least 1")


class Tokens(NamedTuple):
    """The generated tokens of one prompt; ``draft`` is None for a model without a draft."""

    token_ids: list[int]
    draft: list[int] | None


@dataclass(kw_only=True)
class PairOutcome:
    """The outcome of one engine with one model. ``problems`` is empty exactly if every check passed."""

    engine: str
    model: str
    requests: int
    token_exact: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    kv_bytes: int = 0
    transfer_s: float = 0.0
    lane: str = ""

    def report(self, *, json_output: bool) -> None:
        """Print the outcome as one line, its problems to stderr, and JSON on demand."""
        name, verdict = f"{self.engine}/{self.model}", "FAILED" if self.problems else "ok"
        moved = f"{self.kv_bytes / 1e6:.3g} MB over {self.lane}" if self.lane else "no KV came"
        found = f"{self.token_exact} of {self.requests} exact, {moved}, {self.seconds:.1f} s"
        line = f"{verdict:6} {name:15} {found}"
        print(line, file=sys.stderr if json_output else sys.stdout, flush=True)
        for problem in self.problems:
            _note(f"{name}: {problem}")
        if json_output:
            print(json.dumps(asdict(self)), flush=True)


def run_demo(options: DemoOptions, *, json_output: bool = False) -> int:
    """Run the demo. Outcomes go to stdout, all else to stderr.

    Returns the exit code: 1 if a check failed.
    Raises ``ConfigError``: an unknown name, or an engine that was named, or every engine, cannot run here.
    """
    import aiohttp  # noqa: F401  The processes need it, and would each fail for want of it.

    from kvconnect.engine.registry import available_engines

    models = _known("model", options.model, MODELS)
    # The memory engine works within one process only.
    engines = _known("engine", options.engine, [name for name in engine_entry_points() if name != "memory"])
    reasons = {name: problem for name, problem in available_engines().items() if problem and name in engines}
    if reasons and (options.engine or len(reasons) == len(engines)):
        problems = "; ".join(f"engine {name!r} cannot run here: {why}" for name, why in reasons.items())
        raise ConfigError(problems)
    for name, why in reasons.items():
        _note(f"{name} is skipped: {why}")
        engines.remove(name)
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-demo-"))
    failed = False
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        for model in models:
            for outcome in _run_model(engines, model, options, folder):
                failed = failed or bool(outcome.problems)
                outcome.report(json_output=json_output)
    finally:
        signal.signal(signal.SIGTERM, before)
        if failed:
            _note(f"logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if failed else 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that every ``with`` block ends its children."""
    raise SystemExit(128 + number)


def _known(what: str, names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """These names without repeats; none means all. Raises ``ConfigError`` for a name not accepted."""
    for name in names:
        if name not in accepted:
            raise ConfigError(f"{what} {name!r} is unknown; choose from {', '.join(accepted)}")
    return list(dict.fromkeys(names)) or list(accepted)


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """``count`` different prompts of random ids, whose lengths lie on and around every block boundary.

    The same arguments always give the same prompts. No prompt but those of one token is the beginning of
    another: a node that has cached the others still lacks the end of each.
    """
    generator = random.Random(seed)
    shared = [generator.randrange(VOCAB) for _ in range(_SHARED_TOKENS)]
    prompts = []
    for index in range(count):
        length = _LENGTHS[index % len(_LENGTHS)]
        prompt = [generator.randrange(VOCAB) for _ in range(length)]
        if index % _SHARED_EVERY == _SHARED_EVERY - 1:
            prompt = shared + prompt[: max(2, length - _SHARED_TOKENS)]
        prompts.append(prompt)
    return prompts


# --- the processes --------------------------------------------------------------------------------


def _run_model(
    engines: Sequence[str], model: str, options: DemoOptions, folder: Path
) -> Iterator[PairOutcome]:
    """One model with every engine. The single node runs once, while the first pair starts."""
    prompts = make_prompts(options.requests, PROMPT_SEED)
    expected: list[Tokens | BadAnswer] = []
    node = ("--device", options.device, "--kv-cache-dtype", options.kv_cache_dtype)
    serve = ("serve", "--model", model, "--port", "0", *node)
    with Children(folder) as single:
        alone = single.start(f"single-{model}", *serve)
        for engine in engines:
            outcome = PairOutcome(engine=engine, model=model, requests=options.requests)
            started = time.monotonic()
            _note(f"{'...':6} {engine + '/' + model:15} its processes start, which takes some seconds")
            with Children(folder) as children:
                try:
                    nodes = start_nodes(children, engine, model, *serve, on_cpu=options.device == "cpu")
                    if not expected:
                        expected = ask_all(alone.wait_ready(), model, prompts)
                        single.end()
                    router = start_router(children, *nodes)
                    _judge(outcome, *nodes, router, prompts, expected)
                except KVConnectError as error:
                    outcome.problems.append(str(error))
                outcome.seconds = round(time.monotonic() - started, 2)
                if outcome.problems:
                    _note(children.tails())
            yield outcome
            if not expected:
                break  # there is nothing to compare with


def start_nodes(
    children: Children, engine: str, model: str, *serve: str, on_cpu: bool = True
) -> tuple[Child, Child]:
    """Start a prefill and a decode node with the command ``serve``. Returns before they are ready."""

    def start(side: str, role: str, *more: str) -> Child:
        name = f"{side}-{engine}-{model}"
        protocol = PROTOCOLS.get(engine, "auto") if on_cpu else "auto"
        extra = {"engine": engine, "protocol": protocol, "host": "127.0.0.1", "port": 0}
        config = json.dumps({"kv_role": role, "engine_id": name, "kv_connector_extra_config": extra})
        return children.start(name, *serve, "--kv-transfer-config", config, *more)

    own = ("--reserved-blocks", str(RESERVED_BLOCKS))
    return start("prefill", "kv_producer"), start("decode", "kv_consumer", *own)


def start_router(children: Children, prefill: Child, decode: Child) -> Child:
    """Wait for both nodes, then start a router for them and wait until it is ready to route.

    Raises ``ChildFailed`` if a process ends or is too slow, or the router does not find both nodes healthy.
    """
    options = ("--port", "0", "--prefill", prefill.wait_ready(), "--decode", decode.wait_ready())
    router = children.start(prefill.name.replace("prefill", "router", 1), "router", *options)
    router.wait_ready()
    router.wait_answer("/ready?all", READY_TIMEOUT_S)
    return router


def ask(url: str, model: str, prompt: Sequence[int], **more: Any) -> Any:
    """The whole answer to one completion. Raises ``BadAnswer``: an error, or no answer."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": MAX_TOKENS, "temperature": 0, **more}
    return fetch_json(url + "/v1/completions", body, REQUEST_TIMEOUT_S)


def ask_all(url: str, model: str, prompts: Sequence[Sequence[int]]) -> list[Tokens | BadAnswer]:
    """Send all prompts, ``CONCURRENCY`` at a time. The result of a failed one is its error."""

    def one(prompt: Sequence[int]) -> Tokens | BadAnswer:
        try:
            return tokens_of(ask(url, model, prompt))
        except BadAnswer as error:
            return error

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(one, prompts))


def tokens_of(answer: Any) -> Tokens:
    """The generated tokens in an answer. Raises ``BadAnswer`` if there are none."""
    try:
        drafts = answer.get("draft_token_ids")
        return Tokens(list(answer["choices"][0]["token_ids"]), None if drafts is None else list(drafts))
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise BadAnswer(f"an answer without token ids: {str(answer)[:200]}") from error


# --- the rules by which a pair is right or wrong --------------------------------------------------


def _judge(
    outcome: PairOutcome,
    prefill: Child,
    decode: Child,
    router: Child,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Tokens | BadAnswer],
) -> None:
    """Send all prompts through a pair and record the problems."""
    before = read_metrics(decode.url)
    # The first prompt alone, so that the router knows the prefill node before the others come.
    got = [
        answer for some in (prompts[:1], prompts[1:]) for answer in ask_all(router.url, outcome.model, some)
    ]
    for index, (prompt, mine, single) in enumerate(zip(prompts, got, expected, strict=True)):
        if problem := difference(mine, single):
            outcome.problems.append(f"prompt {index} of {len(prompt)} tokens: {problem}")
        else:
            outcome.token_exact += 1
    judge_transfer(outcome, before, read_metrics(decode.url), prompts)
    alone = growth({}, read_metrics(router.url), "kvconnect_router_fallbacks_total")
    # For a one-token prompt a prefill node of a recurrent model has no KV to send.
    if alone > sum(len(prompt) == 1 for prompt in prompts):
        outcome.problems.append(f"the router sent {alone:.0f} requests to the decode node alone")
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    for side, child in (("prefill", prefill), ("decode", decode)):
        while (state := fetch_json(child.url + "/debug/state"))["blocks"]["held"]:
            if time.monotonic() > deadline:
                outcome.problems.append(f"the {side} node did not come to rest: {state}")
                break
            time.sleep(0.1)


def difference(pair: Tokens | BadAnswer, single: Tokens | BadAnswer) -> str:
    """How the pair's tokens differ from the single node's; empty if they are equal."""
    for name, answer in (("single node", single), ("pair", pair)):
        if isinstance(answer, BadAnswer):
            return f"the {name} failed: {answer}"
        if not answer.token_ids:
            return f"the {name} generated nothing"
    assert isinstance(pair, Tokens)
    assert isinstance(single, Tokens)
    for what, mine, theirs in zip(("tokens", "draft tokens"), pair, single, strict=True):
        both = itertools.zip_longest(mine or (), theirs or (), fillvalue="nothing")
        for place, (one, other) in enumerate(both):
            if one != other:
                return f"{what} differ at place {place}: {one} from the pair, {other} from the single node"
    return ""


def judge_transfer(
    outcome: PairOutcome, before: Samples, after: Samples, prompts: Sequence[Sequence[int]]
) -> None:
    """Check the counters: a pair that computes every prompt twice would be token-exact too."""
    received = {"direction": "received"}
    outcome.kv_bytes = int(growth(before, after, "kvconnect_transfer_bytes_total", **received))
    outcome.transfer_s = growth(before, after, "kvconnect_transfer_seconds_total", **received)
    moved = {pair for pair in after if pair[0] == "kvconnect_transfer_bytes_total"}
    grown = [dict(labels) for name, labels in moved if after[name, labels] > before.get((name, labels), 0.0)]
    outcome.lane = "+".join(sorted({one["lane"] for one in grown if one["direction"] == "received"}))
    count = growth(before, after, "kvconnect_transfers_total", outcome="ok", **received)
    wrong = growth(before, after, "kvconnect_transfers_total", **received) - count
    # The KV of a one-token prompt may be cheaper to compute than to fetch.
    needed = sum(len(prompt) > 1 for prompt in prompts)
    if count < needed:
        outcome.problems.append(
            f"{needed} prompts need KV of the prefill node, but {count:.0f} received some"
        )
    if wrong:
        outcome.problems.append(f"{wrong:.0f} transfers failed")
    if needed and not (outcome.kv_bytes > 0 and outcome.transfer_s > 0):
        outcome.problems.append(f"{outcome.kv_bytes} bytes in {outcome.transfer_s} s were received")
