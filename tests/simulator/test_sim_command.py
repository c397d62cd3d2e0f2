"""``python -m tests.simulator``: what it says, and its exit code."""

from __future__ import annotations

from typer.testing import CliRunner

from kvconnect.transfer.orders import Reports
from tests.simulator.__main__ import app


def sim(*options: str):
    return CliRunner().invoke(app, list(options))


def test_several_processes_run_the_same_seeds_and_show_the_same_sums():
    one, two = sim("--seeds", "6", "--jobs", "1"), sim("--seeds", "6", "--jobs", "2")
    assert (one.exit_code, two.exit_code) == (0, 0), two.output
    assert "6 seeds in" in one.output
    sums = [[line for line in ran.output.splitlines() if " seeds in " not in line] for ran in (one, two)]
    assert any("loads ok" in line for line in sums[0])
    assert sums[0] == sums[1]


def test_a_broken_invariant_is_shown_with_its_seed_and_how_to_replay_it(monkeypatch):
    add = Reports.add
    monkeypatch.setattr(Reports, "add", lambda self, new: None if new.received else add(self, new))
    ran = sim("--seeds", "20", "--jobs", "1")
    assert ran.exit_code == 1
    assert "replay: python -m tests.simulator --first-seed " in ran.output
    seed = ran.output.split("--first-seed ")[1].split()[0]
    again = sim("--first-seed", seed, "--trace")
    assert again.exit_code == 1
    broken = next(line for line in ran.output.splitlines() if line.startswith(f"seed {seed} breaks"))
    assert broken in again.output
    assert "Fetch" in again.output
