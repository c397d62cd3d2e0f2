"""The measurement of servers under load, once with real servers, and what it may not be told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from tests.vllm.measure_load import parsed
from tests.vllm.servers import ROOT


@pytest.mark.parametrize(
    "arguments", [["--load", "9:8"], ["--load", "9"], ["--gpus", "1"], ["--gpus", "none"]]
)
def test_what_it_may_not_be_told(arguments, capsys):
    with pytest.raises(SystemExit):
        parsed(arguments)
    assert "error: " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(900)
def test_real_servers(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")
    out = tmp_path / "lines"
    command = [sys.executable, "-m", "tests.vllm.measure_load", "--cpu", "--flow", "parallel"]
    command += ["--load", "300:8:1", "--requests", "6", "--rounds", "1", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    loads = {line["connector"]: line for line in lines if line["kind"] == "load"}
    assert loads.keys() == {"kvconnect-nixl", "NixlConnector"}, done.stdout[-3000:]
    for load in loads.values():
        assert (load["requests"], load["failed"], load["loads"]) == (6, 0, 6), load["errors"]
        assert load["decode_gap_ms"]["p99"] > 0
    (ratio,) = [line for line in lines if line["kind"] == "ratio"]
    assert ratio.keys() >= {"first_token_ms", "prefill_leg_ms", "decode_leg_ms", "load_ms", "decode_gap_ms"}
