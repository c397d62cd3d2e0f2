"""A peer whose answers are mutated on their way."""

from __future__ import annotations

import json
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from tests.faults.__main__ import app
from tests.faults.hostile import HostileReport


@pytest.mark.parametrize(
    "requests", [pytest.param(6, id="6"), pytest.param(500, id="500", marks=pytest.mark.full)]
)
@pytest.mark.timeout(1200)
def test_a_decode_node_outlives_lies(requests):
    ran = CliRunner().invoke(app, ["liars", "--engine", "nixl", "--requests", str(requests)])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert report["problems"] == []
    assert report["connections"] == requests
    assert report["frames"]["prefill-0 to decode-0"] > requests / 2


def test_a_problem_makes_the_command_fail(monkeypatch):
    stage = MagicMock(**{"tails.return_value": "the last lines of a log"})
    stage.__enter__.return_value = stage
    monkeypatch.setattr("tests.faults.__main__.Stage", lambda options: stage)
    monkeypatch.setattr("tests.faults.__main__.Questions", lambda *_, **__: None)
    found = HostileReport("liars", "nixl", problems=["decode-0 ended"])
    monkeypatch.setattr("tests.faults.__main__.run_liars", lambda *_, **__: found)
    ran = CliRunner().invoke(app, ["liars"])
    assert ran.exit_code == 1
    assert json.loads(ran.stdout)["problems"] == ["decode-0 ended"]
    assert "the last lines of a log" in ran.stderr
