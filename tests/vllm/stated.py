"""What real vLLM engines state of their KV, each in a process of its own: `python -m tests.vllm.stated FILE`.

The file has a list of starts in JSON; for each a line is printed with the identity that its connector would
greet peers with, or with the error that it ended with. They are forked from one process, since to import vLLM
is most of a start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvconnect.cache.identity import Identity

_ANSWER = "stated: "


class Start(msgspec.Struct):
    """One engine: the folder of its model, flags, and ``isa`` of its attention if that is named."""

    folder: str
    flags: list[str] = []
    isa: str = ""


def stated(starts: Mapping[str, Start], folder: Path) -> dict[str, Identity | str]:
    """By name what each states, or the error that it ended with."""
    given = folder / "starts.json"
    given.write_bytes(msgspec.json.encode(list(starts.values())))
    command = [sys.executable, "-m", "tests.vllm.stated", str(given)]
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    assert len(lines) == len(starts), done.stdout[-4000:] + done.stderr[-8000:]
    found = [json.loads(line.removeprefix(_ANSWER)) for line in lines]
    return {
        name: one if isinstance(one, str) else msgspec.convert(one, Identity)
        for name, one in zip(starts, found, strict=True)
    }


def _identity(start: Start) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.engine.llm_engine import LLMEngine

    if start.isa:
        cpu_attn._get_attn_isa = lambda *_, **__: start.isa
    config = {"kv_connector": "KVConnect", "kv_role": "kv_both"}
    config["kv_connector_extra_config"] = {"engine": "memory", "insecure": True, "port": 0}
    given = ["--model", start.folder, "--enforce-eager", "--dtype", "bfloat16", "--block-size", "128"]
    given += ["--max-num-seqs", "8", "--kv-transfer-config", json.dumps(config), *start.flags]
    if "--max-model-len" not in given:
        given += ["--max-model-len", "4096"]
    parsed = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(given)
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parsed))
    assert engine
    return get_kv_transfer_group()._worker.transfer.local.introduction.meaning.identity


def _run(starts: Sequence[Start]) -> None:
    # Imported before the fork, so that no child imports it again.
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    import vllm.v1.worker.cpu_worker  # noqa: F401

    for start in starts:
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            try:
                answer = msgspec.to_builtins(_identity(start))
            except BaseException:
                answer = traceback.format_exc()[-3000:]
            print(_ANSWER + json.dumps(answer), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    _run(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Start]))
