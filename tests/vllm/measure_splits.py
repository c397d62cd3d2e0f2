"""Pairs whose servers divide a model over ranks: ``python -m tests.vllm.measure_splits --help``.

For each case the JSON line has how many answers to handed-over prompts are those of the decode server alone,
which divides the model alike and has no connector at work, and where the two differ first. Where prefill and
decode server divide it differently, sums are rounded differently: the line also has how many answers are
those of a pair with vLLM's NixlConnector and the same division. A case that cannot run has the reason.
Nothing here asserts a time.

    python -m tests.vllm.measure_splits --cpu --case tp2 --case mooncake
    python -m tests.vllm.measure_splits --gpus 0,1
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconnect.errors import KVConnectError
from tests.vllm import dense_model, tiny_models
from tests.vllm.pairs import (
    NIXL,
    Lines,
    Pair,
    Variant,
    both_served,
    command_line,
    device,
    named_variant,
    prepared,
)
from tests.vllm.servers import EXACT, Server, random_prompt, running
from tests.vllm.tiny_models import Recipe

_TP2 = ("--tensor-parallel-size", "2", "--disable-custom-all-reduce")
_PP2 = ("--pipeline-parallel-size", "2")
# Turns as long as blocks, without which the sides may not differ in context parallelism.
_DCP2 = (*_TP2, "--decode-context-parallel-size", "2", "--cp-kv-cache-interleave-size", "16")
_DP2 = ("--data-parallel-size", "2", "--enable-expert-parallel")
_FP8 = ("--kv-cache-dtype", "fp8")
_LENGTHS = (17, 300, 1025, 2048, 3333, 4096, 4097, 700)


@dataclass(frozen=True)
class Case:
    """Options of both servers. ``gpus`` are numbers of those that were given."""

    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    gpus: tuple[str, str] = ("01", "01")
    model: str = "wide"
    engine: str = "nixl"

    @property
    def is_same(self) -> bool:
        return self.prefill == self.decode


CASES: Mapping[str, Case] = {
    "tp2": Case(_TP2, _TP2),
    "tp2-tp1": Case(_TP2, (), ("01", "1")),
    "tp1-tp2": Case((), _TP2, ("0", "01")),
    "pp2-tp2": Case(_PP2, _TP2),
    "pp2-tp1": Case(_PP2, (), ("01", "1")),
    "dcp2-tp2": Case(_DCP2, _TP2, model="narrow"),
    "dp2": Case(_DP2, _DP2, model="moe"),
    "fp8": Case(_FP8, _FP8, ("0", "1")),
    "mooncake": Case((), (), ("0", "1"), engine="mooncake"),
}


def _pair(name: str, case: Case, variant: Variant, recipe: Recipe, logs: Path, given: Any) -> Pair:
    options = ["--max-model-len", "5000", *(EXACT if given.cpu else ())]
    gpus, logs = given.gpus.split(","), logs / name
    logs.mkdir(exist_ok=True)
    places = ["|".join(where) for where in case.gpus]
    if not given.cpu:
        places = [",".join(gpus[int(number)] for number in where) for where in case.gpus]
    own = [*options, *case.prefill], [*options, *case.decode]
    return both_served(variant, recipe, logs, given, own, places, graphs=(), NCCL_NVLS_ENABLE="0")


def _differ_at(one: Iterable[int], other: Iterable[int]) -> int | None:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def _answers(prefill: Server, decode: Server, seed: int) -> tuple[list[list[int]], list[int | None], float]:
    """Answers to handed-over prompts, where each differs from the decode server's own, and tokens loaded."""
    before, answers, differ = decode.loaded_tokens(), [], []
    for number, length in enumerate(_LENGTHS):
        prompt = random_prompt(length, seed + number)
        answers.append(decode.from_prefill(prefill, prompt))
        differ.append(_differ_at(answers[-1], decode.local_tokens(prompt)))
    return answers, differ, decode.loaded_tokens() - before


def measure(name: str, models: Mapping[str, Recipe], logs: Path, given: Any, lines: Lines) -> None:
    case, found = CASES[name], {}
    own = named_variant(case.engine, {"slot_bytes": 64 << 20, "num_slots": 4, **given.extra})

    def pair(variant: Variant) -> Any:
        return running(*_pair(name, case, variant, models[case.model], logs, given).servers)

    try:
        with pair(own) as (prefill, decode):
            answers, differ, loaded = _answers(prefill, decode, 100)
        found = {"as_decode_server": differ.count(None), "differ_at": differ, "loaded_tokens": loaded}
    except (KVConnectError, AssertionError) as error:
        lines.write("case", name=name, failed=_reason(error))
        return
    if not case.is_same:
        try:
            with pair(NIXL) as (prefill, decode):
                theirs, _, _ = _answers(prefill, decode, 100)
            same = sum(one == other for one, other in zip(answers, theirs, strict=True))
            found["as_nixl_connector"] = same
        except (KVConnectError, AssertionError) as error:
            found["nixl_connector_failed"] = _reason(error)
    lines.write("case", name=name, answers=len(answers), **found)


def _reason(error: Exception) -> str:
    """The first exception in a server's log, or what was raised."""
    found = re.search(r"\bERROR\b.*?\b((?:\w+Error|\w+Exception)\b.*)", str(error))
    return (found[1] if found else str(error))[-400:]


def main() -> None:
    given = command_line(
        __doc__,
        None,
        {"case": f"of {', '.join(CASES)}; repeatable; all", "at_once": "cases that are run at once"},
        case=[],
        extra={},
        gpus="0,1",
        at_once=(1, 3),
        chunk=(512, 2048),
        kv_gib=(1, 2),
    )
    if unknown := set(given.case) - set(CASES):
        given.error(f"--case {', '.join(unknown)} is unknown; accepted: {', '.join(CASES)}")
    with (
        tempfile.TemporaryDirectory() as folder,
        prepared(given, tiny="gqa", shape=_shape(kv_heads=4), forks=True) as (wide, logs, lines),
        ThreadPoolExecutor(given.at_once) as pool,
    ):
        narrow = dense_model.write_model(Path(folder) / "narrow", _shape(kv_heads=1), device(given))
        models = {"wide": wide, "narrow": narrow, "moe": tiny_models.write_model("moe", Path(folder))}
        list(pool.map(lambda name: measure(name, models, logs, given, lines), given.case or CASES))


def _shape(kv_heads: int) -> dense_model.Shape:
    return dense_model.Shape(layers=4, hidden=512, intermediate=1024, heads=8, kv_heads=kv_heads)


if __name__ == "__main__":
    main()
