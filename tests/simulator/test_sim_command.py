"""``python -m tests.simulator``: what it says, and its exit code."""

from __future__ import annotations

from typer.testing import CliRunner

from kvconnect.transfer.orders import Reports
from tests.simulator.__main__ import app


def sim(*options: str):
    return CliRunner().invoke(app, list(options), env={"COLUMNS": "200"})


def test_it_shows_sums():
    ran = sim("--seeds", "3", "--jobs", "1")
    assert ran.exit_code == 0, ran.output
    assert "3 seeds" in ran.output
    assert "loads ok" in ran.output


def test_several_processes_run_the_same_seeds():
    one, two = sim("--seeds", "30", "--jobs", "1"), sim("--seeds", "30", "--jobs", "2")
    assert (one.exit_code, two.exit_code) == (0, 0), two.output
    kept = [
        # Cells without their width: a slow run's milliseconds are wider.
        [
            [cell.strip() for cell in line.split("│")]
            for line in ran.output.splitlines()
            if "│" in line and "millis" not in line
        ]
        for ran in (one, two)
    ]
    assert kept[0] == kept[1]


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
