"""All engines with all models. Owns which combinations run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.demo import pair
from kvconnect.demo.children import Child, Children
from kvconnect.demo.http import BadAnswer
from kvconnect.demo.outcome import Outcome, Tokens
from kvconnect.demo.prompts import make_prompts
from kvconnect.demo.report import Finding, known, note, report
from kvconnect.engine_names import engine_entry_points
from kvconnect.errors import ConfigError, KVConnectError

MODELS = ("gqa", "mla", "mixed", "sliding", "hybrid")
PROMPT_SEED = 7


@dataclass(frozen=True)
class DemoOptions:
    """What runs; no engine or no model named means all of them.

    ``require`` are engines that must be able to run here. ``kv_cache_dtype`` is what every node's cache
    keeps, ``flow`` the router's, ``path`` the nodes'. The decode node has blocks of ``decode_block_size``
    tokens, if that is not 0.
    """

    engines: Sequence[str] = ()
    models: Sequence[str] = ()
    requests: int = 8
    require: Sequence[str] = ()
    device: str = "cpu"
    kv_cache_dtype: str = "auto"
    flow: str = "sequential"
    path: str = "packed"
    decode_block_size: int = 0

    @property
    def node_options(self) -> Sequence[str]:
        """What every node is started with."""
        return ("--device", self.device, "--kv-cache-dtype", self.kv_cache_dtype)


def run_demo(options: DemoOptions, *, json_output: bool = False) -> int:
    """Returns the exit code: 1 if anything was not as it must be, or a required engine cannot run here.

    Raises:
        ConfigError: an unknown name, or an engine asked for by name cannot run here.
    """
    models = known("model", options.models, MODELS)
    known("engine", options.require, _engines())
    known("flow", [options.flow], pair.FLOWS)
    known("path", [options.path], pair.PATHS)
    engines, skipped = _usable_engines(options.engines)
    for name, reason in skipped.items():
        note(f"{name} is skipped: {reason}")
    missing = [name for name in options.require if name not in engines]
    for name in missing:
        reason = skipped.get(name, "it is not among the engines asked for")
        note(f"{name} is required and cannot run: {reason}")
    if not engines:
        note("no engine can run here")
    if missing or not engines:
        return 1

    def run(folder: Path) -> Iterator[Finding]:
        for model in models:
            yield from _run_model(engines, model, options, folder)

    return report(run, json_output=json_output)


def _usable_engines(asked: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Engines to run, and why each of the others is not. One that was asked for by name must work."""
    from kvconnect.engine.registry import available_engines

    reasons = available_engines()
    problems = {name: reasons[name] for name in known("engine", asked, _engines())}
    for name, reason in problems.items():
        if reason and asked:
            raise ConfigError(f"engine {name!r} cannot run here: {reason}")
    return [n for n, why in problems.items() if not why], {n: why for n, why in problems.items() if why}


def _engines() -> list[str]:
    """Those that are registered, without the one that does not leave its process."""
    return [name for name in engine_entry_points() if name != "memory"]


def _run_model(engines: Sequence[str], model: str, options: DemoOptions, folder: Path) -> Iterator[Finding]:
    """One model with every engine. The single node is asked once, while the first pair starts."""
    prompts = make_prompts(options.requests, PROMPT_SEED)
    extra = make_prompts(3, PROMPT_SEED + 1)[2] + make_prompts(5, PROMPT_SEED + 2)[4]
    expected: list[Tokens | BadAnswer] = []
    node = options.node_options
    decode = ("--block-size", str(options.decode_block_size)) if options.decode_block_size else ()
    with Children(folder) as single:
        reference: Child | None = pair.start_reference(single, model, *node)
        for engine in engines:
            outcome = Outcome(engine=engine, model=model, requests=options.requests)
            started = time.monotonic()
            with Children(folder) as children:
                try:
                    nodes = pair.start_nodes(
                        children, engine, model, *node, path=options.path, decode_options=decode
                    )
                    if reference is not None:
                        url = reference.wait_ready(time.monotonic() + pair.START_TIMEOUT_S)
                        expected = pair.ask_all(url, model, [*prompts, extra])
                        single.end()
                        reference = None
                    both = pair.start_router(children, engine, model, nodes, options.flow)
                    pair.judge(outcome, both, prompts, expected[:-1], (extra, expected[-1]))
                except KVConnectError as error:
                    outcome.problems.append(str(error))
                outcome.seconds = round(time.monotonic() - started, 2)
                if outcome.problems:
                    note(children.tails())
            yield outcome
            if reference is not None:
                break  # without its answers there is nothing to compare with
