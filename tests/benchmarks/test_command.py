"""``python -m benchmarks``: each starts and measures something."""

from __future__ import annotations

import json
import math

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS, make_app
from kvconnect.errors import ConfigError

# Small runs, and the number of their findings.
RUNS = {
    "turns": ("--turns 10 --records 3 --records 30", 8),
    "pack": ("--device cpu", 8),
    "offload": ("--page-bytes 1024 --regions 3 --blocks 4", 2),
    "transfer": (
        "--engine nixl --page-bytes 1024 --blocks 3 --regions 2 --requests 4 --in-flight 1 --in-flight 2 "
        "--repeat 2 --batch-bytes 65536",
        3,
    ),
}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_starts_and_measures(name):
    options, count = RUNS[name]
    ran = CliRunner().invoke(make_app([name]), [name, *options.split()])
    assert ran.exit_code == 0, ran.output
    findings = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(findings) == count
    for found in findings:
        for what, value in found.items():
            if what.endswith(("_us", "_s", "seconds", "ratio")) and value is not None:
                values = value if isinstance(value, list) else [value]
                assert all(0 < one < math.inf for one in values), what


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("transfer --engine nope", "engine is 'nope': accepted: auto"),
        ("transfer --device tpu", "device is 'tpu'; accepted: cpu, cuda"),
        ("transfer --timeout-s 0", "timeout_s is 0.0, it must be more than 0"),
        ("transfer --page-bytes 200", "page_bytes is 200; accepted: multiples of 128"),
        ("transfer --extra [1]", "extra holds list; accepted: a JSON object"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(line, text):
    arguments = line.split()
    with pytest.raises(ConfigError, match=text):
        make_app(arguments)(arguments, standalone_mode=False)
