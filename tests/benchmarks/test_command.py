"""``python -m benchmarks``: its options, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import BENCHMARKS, make_app

ROOT = Path(__file__).parents[2]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_the_list_is_there_without_torch() -> None:
    code = "import sys; import benchmarks.__main__ as m; m.make_app([])(['--help'], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(f" {name} " in done.stdout for name in BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_name_is_a_command(name: str) -> None:
    shown = CliRunner().invoke(make_app([name]), [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert "--json" in shown.output


def test_scheduler_measures_a_step_of_steady_decode_first() -> None:
    done = benchmarks("scheduler", "--json", "--turns", "1", "--steps", "50")
    assert done.returncode == 0, done.stderr
    steady = json.loads(done.stdout.splitlines()[0])
    assert (steady["step"], steady["running"]) == ("steady decode", 256)
    assert steady["best_us"] > 0
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["watched_by"] == "all three"


def test_a_wrong_setting_is_one_line_and_exit_code_2() -> None:
    done = benchmarks("transfer", "--engine", "nixl", "--extra", '{"prot": 1}')
    assert done.returncode == 2
    assert "prot" in done.stderr
    assert "Traceback" not in done.stderr
