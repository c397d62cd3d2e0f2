"""``python -m benchmarks``: each starts and measures something, and what cannot be is said."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS, make_app
from kvconnect.errors import ConfigError

# In little; the numbers are of findings.
RUNS = {
    "scheduler": ("--turns 1 --requests 32", 5),
    "turns": ("--turns 10 --records 3 --records 30", 8),
    "pack": ("--device cpu", 12),
    "offload": ("--device cpu --page-bytes 1024 --regions 3 --blocks 4", 2),
    "transfer": (
        "--engine nixl --page-bytes 1024 --blocks 3 --regions 2 --requests 4 --in-flight 1 --in-flight 2 "
        "--repeat 2 --batch-bytes 65536",
        3,
    ),
    "node": (
        "--engine nixl --rounds 2 --seconds 1 --in-flight 2 --request-mb 0.05 --receive-gb-per-s 0.002 "
        '--extra {"slot_bytes":65536}',
        1,
    ),
    "returning": ("--prompt-tokens 200 --prompts 3 --batched-tokens 64", 1),
}


def run(name: str, options: str):
    ran = CliRunner().invoke(make_app([name]), [name, "--json", *options.split()])
    assert ran.exit_code == 0, ran.output
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_starts_and_measures(name):
    options, count = RUNS[name]
    findings = run(name, options)
    assert len(findings) == count
    for found in findings:
        for what, value in found.items():
            if what.endswith(("_us", "_s", "seconds", "ratio")) and what != "added_us" and value is not None:
                values = value if isinstance(value, list) else [value]
                assert all(0 < one < math.inf for one in values), what


def test_a_table_is_printed_for_people():
    ran = CliRunner().invoke(make_app(["offload"]), ["offload", *RUNS["offload"][0].split()])
    assert ran.exit_code == 0
    assert "contiguous_out" in ran.output
    assert "offload, device cpu, page_bytes 1024" in ran.output


def test_the_list_is_there_without_torch():
    code = "import sys; import benchmarks.__main__ as m; m.make_app([])(['--help'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=root)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in BENCHMARKS)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("transfer --engine nope", "engine is 'nope': accepted: auto"),
        ("transfer --device tpu", "device is 'tpu'; accepted: cpu, cuda"),
        ("transfer --page-bytes 1000", "page_bytes is 1000; accepted: multiples of"),
        ("transfer --layouts nhd16:hnd32 --blocks 3", "blocks is 3: its 48 tokens do not fill"),
        ("transfer --layouts nhd16:hnd24", "layouts is 'nhd16:hnd24'; the smaller block size"),
        ("transfer --layouts a:b:c", "layouts is 'a:b:c'; accepted: PREFILL:DECODE"),
        ("transfer --timeout-s 0", "timeout_s is 0.0, it must be more than 0"),
        ("transfer --extra [1]", r"extra is '\[1\]', it must be a JSON object"),
        ("node --receive-gb-per-s -1", "receive_gb_per_s is -1.0, it must be at least 0"),
        ("offload --page-bytes 100", "page_bytes is 100; accepted: multiples of 64"),
        ("returning --prompts 2", "prompts is 2, it must be at least 3"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(line, says):
    arguments = line.split()
    with pytest.raises(ConfigError, match=says):
        make_app(arguments)(arguments, standalone_mode=False)


@pytest.mark.parametrize(
    ("extra", "code", "says"),
    [('{"prot":1}', 2, "prot"), ('{"engine_options":{"nope":1}}', 1, "engine_options has nope")],
)
def test_what_fails_is_said_in_a_line(extra, code, says):
    command = [sys.executable, "-m", "benchmarks", "transfer", "--engine", "nixl", "--extra", extra]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
