"""All engines with all models. Owns which combinations run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvconnect.demo import pair
from kvconnect.demo.children import Child, Children
from kvconnect.demo.demo_options import DemoOptions
from kvconnect.demo.http import BadAnswer
from kvconnect.demo.pair_outcome import PairOutcome, Tokens
from kvconnect.demo.prompts import make_prompts
from kvconnect.demo.report import judging, note, report
from kvconnect.errors import ConfigError
from kvconnect.packages import engine_entry_points

MODELS = ("gqa", "mla", "mixed", "sliding", "hybrid")
PROMPT_SEED = 7


def run_demo(options: DemoOptions, *, json_output: bool = False) -> int:
    """Returns the exit code: 1 if anything was not as it must be, or no engine can run here.

    Raises ``ConfigError``: an unknown name, or an engine asked for by name cannot run here.
    """
    from kvconnect.engine.registry import available_engines

    models = _known("model", options.model, MODELS)
    # The memory engine does not leave its process.
    registered = [name for name in engine_entry_points() if name != "memory"]
    chosen = _known("engine", options.engine, registered)
    reasons = available_engines()
    skipped = {name: reasons[name] for name in chosen if reasons[name]}
    for name, reason in skipped.items():
        if options.engine:
            raise ConfigError(f"engine {name!r} cannot run here: {reason}")
        note(f"{name} is skipped: {reason}")
    engines = [name for name in chosen if name not in skipped]
    if not engines:
        note("no engine can run here")
        return 1

    def run(folder: Path) -> Iterator[PairOutcome]:
        for model in models:
            yield from _run_model(engines, model, options, folder)

    return report(run, json_output=json_output)


def _known(what: str, names: Sequence[str], accepted: Sequence[str]) -> list[str]:
    """These names, each once; none means all. Raises ConfigError: one is not accepted."""
    for name in names:
        if name not in accepted:
            raise ConfigError(f"{what} {name!r} is unknown; choose from {', '.join(accepted)}")
    return list(dict.fromkeys(names)) or list(accepted)


def _run_model(
    engines: Sequence[str], model: str, options: DemoOptions, folder: Path
) -> Iterator[PairOutcome]:
    """One model with every engine. The single node is asked once, while the first pair starts."""
    prompts = make_prompts(options.requests, PROMPT_SEED)
    extra = make_prompts(3, PROMPT_SEED + 1)[2] + make_prompts(5, PROMPT_SEED + 2)[4]
    expected: list[Tokens | BadAnswer] = []
    node = ("--device", options.device, "--kv-cache-dtype", options.kv_cache_dtype)
    with Children(folder) as single:
        reference: Child | None = pair.start_reference(single, model, *node)
        for engine in engines:
            outcome = PairOutcome(engine=engine, model=model, requests=options.requests)
            with judging(outcome, folder) as children:
                nodes = pair.start_nodes(children, engine, model, *node, device=options.device)
                if reference is not None:
                    url = reference.wait_ready()
                    expected = pair.ask_all(url, model, [*prompts, extra])
                    single.end()
                    reference = None
                both = pair.start_router(children, engine, model, nodes)
                pair.judge(outcome, both, prompts, expected[:-1], (extra, expected[-1]))
            yield outcome
            if reference is not None:
                break  # without its answers there is nothing to compare with
