"""All engines with all models, and the report. Owns which combinations run and the exit code."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from kvconnect.demo import pair
from kvconnect.demo.children import Child, Children
from kvconnect.demo.http import BadAnswer
from kvconnect.demo.outcome import Outcome, Tokens
from kvconnect.demo.prompts import make_prompts
from kvconnect.errors import ConfigError, KVConnectError

ENGINES = ("mooncake", "nixl", "memory")
MODELS = ("gqa", "mla", "mixed", "sliding", "hybrid")
PROMPT_SEED = 7


@dataclass(frozen=True)
class _Setup:
    """How every pair is started."""

    node_options: Sequence[str]
    decode_options: Sequence[str]
    flow: str
    path: str


def run_demo(
    *,
    engines: Sequence[str],
    models: Sequence[str],
    requests: int,
    json_output: bool,
    require: Sequence[str] = (),
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
    flow: str = "sequential",
    path: str = "packed",
    decode_block_size: int = 0,
) -> int:
    """Run the demo, with the nodes on ``device``; no engine or no model named means all of them.

    ``kv_cache_dtype`` is what every node's cache keeps, ``flow`` the router's, ``path`` the nodes'. The
    decode node has blocks of ``decode_block_size`` tokens, if that is not 0.

    Returns the exit code: 1 if anything was not as it must be, or a required engine cannot run here.
    Outcomes go to stdout, everything else to stderr.

    Raises:
        ConfigError: an unknown name, or an engine asked for by name cannot run here.
    """
    chosen_models = known("model", models, MODELS)
    known("engine", require, ENGINES)
    known("flow", [flow], pair.FLOWS)
    known("path", [path], pair.PATHS)
    says = Console(stderr=True, highlight=False, soft_wrap=True)
    usable, skipped = _usable_engines(engines, device)
    for name, reason in skipped.items():
        says.print(f"{name} is skipped: {reason}", markup=False)
    missing = [name for name in require if name not in usable]
    for name in missing:
        reason = skipped.get(name, "it is not among the engines asked for")
        says.print(f"{name} is required and cannot run: {reason}", markup=False)
    if missing or not usable:
        if not usable:
            says.print("no engine can run here")
        return 1
    node_options = ("--device", device, "--kv-cache-dtype", kv_cache_dtype)
    decode_options = ("--block-size", str(decode_block_size)) if decode_block_size else ()
    setup = _Setup(node_options, decode_options, flow, path)
    outcomes = _run_all(usable, chosen_models, requests, json_output, setup, says)
    if not json_output:
        _print_table(outcomes)
    failed = [outcome for outcome in outcomes if outcome.problems]
    for outcome in failed:
        for problem in outcome.problems:
            says.print(f"{outcome.engine}/{outcome.model}: {problem}", markup=False)
    return 1 if failed else 0


def known(what: str, names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """These names, each once; none of them means all that are accepted.

    Raises:
        ConfigError: one is not accepted.
    """
    for name in names:
        if name not in accepted:
            raise ConfigError(f"{what} {name!r} is unknown; choose from {', '.join(accepted)}")
    return list(dict.fromkeys(names)) or list(accepted)


def _usable_engines(asked: Sequence[str], device: str) -> tuple[list[str], dict[str, str]]:
    """Engines to run, and why each of the others is not. One that was asked for by name must work."""
    from kvconnect.engine.registry import available_engines

    reasons = available_engines()
    chosen = known("engine", asked, ENGINES)
    problems = {name: reasons.get(name, "this version has no such engine") for name in chosen}
    if device != "cpu" and "memory" in problems:
        problems["memory"] = problems["memory"] or f"it moves CPU memory, the nodes are on {device}"
    for name, reason in problems.items():
        if reason and asked:
            raise ConfigError(f"engine {name!r} cannot run here: {reason}")
    return [n for n in chosen if not problems[n]], {n: why for n, why in problems.items() if why}


def _run_all(
    engines: Sequence[str],
    models: Sequence[str],
    requests: int,
    json_output: bool,
    setup: _Setup,
    says: Console,
) -> list[Outcome]:
    folder = Path(tempfile.mkdtemp(prefix="kvconnect-demo-"))
    outcomes: list[Outcome] = []
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        for model in models:
            for outcome in _run_model(engines, model, requests, setup, folder, says):
                outcomes.append(outcome)
                if json_output:
                    print(outcome.to_json(), flush=True)
    finally:
        signal.signal(signal.SIGTERM, before)
        if any(outcome.problems for outcome in outcomes):
            says.print(f"logs are kept in {folder}", markup=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def _run_model(
    engines: Sequence[str],
    model: str,
    requests: int,
    setup: _Setup,
    folder: Path,
    says: Console,
) -> list[Outcome]:
    """One model with every engine. The single node is asked once, while the first pair starts."""
    prompts = make_prompts(requests, PROMPT_SEED)
    extra = make_prompts(3, PROMPT_SEED + 1)[2] + make_prompts(5, PROMPT_SEED + 2)[4]
    outcomes = []
    expected: list[Tokens | BadAnswer] = []
    with Children(folder) as single:
        reference: Child | None = pair.start_reference(single, model, *setup.node_options)
        for engine in engines:
            outcome = Outcome(engine, model, requests)
            outcomes.append(outcome)
            started = time.monotonic()
            with Children(folder) as children:
                try:
                    nodes = pair.start_nodes(
                        children,
                        engine,
                        model,
                        *setup.node_options,
                        path=setup.path,
                        decode_options=setup.decode_options,
                    )
                    if reference is not None:
                        url = reference.wait_ready(time.monotonic() + pair.START_TIMEOUT_S)
                        expected = pair.ask_all(url, model, [*prompts, extra])
                        single.end()
                        reference = None
                    both = pair.start_router(children, engine, model, nodes, setup.flow)
                    pair.judge(outcome, both, prompts, expected[:-1], (extra, expected[-1]))
                except KVConnectError as error:
                    outcome.problems.append(str(error))
                outcome.seconds = time.monotonic() - started
                if outcome.problems:
                    says.print(children.tails(), markup=False)
            _say(outcome, says)
            if reference is not None:
                break  # without its answers there is nothing to compare with
    return outcomes


def _say(outcome: Outcome, says: Console) -> None:
    verdict = "FAILED" if outcome.problems else "ok"
    says.print(
        f"{verdict:6} {outcome.engine}/{outcome.model}: {outcome.token_exact} of {outcome.requests} "
        f"token-exact, {outcome.kv_bytes} bytes of KV received, {outcome.seconds:.1f} s",
        markup=False,
    )


def _print_table(outcomes: Sequence[Outcome]) -> None:
    table = Table(title="prefill node + decode node against a single node")
    for name in ("engine", "model", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("exact", "KV MB", "GB/s", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("block ids")
    table.add_column("verdict")
    for o in outcomes:
        table.add_row(
            o.engine,
            o.model,
            o.path or "-",
            f"{o.token_exact}/{o.requests}",
            f"{o.kv_bytes / 1e6:.2f}",
            f"{o.gb_per_s:.3f}",
            f"{o.seconds:.1f}",
            "differ" if o.block_ids_differ else "same",
            "[red]failed[/red]" if o.problems else "[green]ok[/green]",
        )
    Console().print(table)


def _raise_exit(number: int, _frame: FrameType | None) -> None:
    """Turn SIGTERM into an exception, so that every ``with`` block ends its children."""
    raise SystemExit(128 + number)
