"""The measurement of servers under load: what it asks whom, what it tells, and once with real servers."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from tests.ports import free_port
from tests.vllm import measure_load
from tests.vllm.load_figures import Load, Sample, figures
from tests.vllm.measure_load import System, parsed, side_by_side, table
from tests.vllm.pairs import Lines
from tests.vllm.servers import ROOT

LOAD = Load(100, 8, 2.0)


def system(name="kvconnect-nixl", places="01", series=measure_load._OURS):
    servers = tuple(SimpleNamespace(name=f"{name}-{at}", url=f"http://{name}-{at}") for at in "PD")
    return System(name, frozenset(places), servers, series)


OURS = system()
NIXL = system("NixlConnector", "23", measure_load._THEIRS)
PLAIN = system("plain", "12", None)


def test_what_the_command_line_says():
    given = parsed([])
    assert (given.loads, given.gpus, given.nixl_gpus, given.plain) == (
        [Load(8192, 128, 2.5)],
        "0,1",
        "0,1",
        None,
    )
    assert parsed(["--plain"]).plain == "0,1"
    assert parsed(["--plain", "4,5"]).plain == "4,5"
    assert parsed(["--load", "9:8:1", "--load", "7:6:2"]).loads == [Load(9, 8, 1), Load(7, 6, 2)]
    assert parsed(["--cpu"]).requests < given.requests
    assert parsed(["--cpu", "--requests", "999"]).requests == 999


@pytest.mark.parametrize(
    "arguments", [["--load", "9:8"], ["--load", "9"], ["--gpus", "1"], ["--gpus", "none"], ["--plain", "4"]]
)
def test_what_it_may_not_say(arguments, capsys):
    with pytest.raises(SystemExit):
        parsed(arguments)
    assert "error: " in capsys.readouterr().err


def test_graphs_and_compilation_are_on_unless_told():
    def options(*arguments):
        return measure_load._options("producer", parsed([*arguments]))

    assert "--no-enforce-eager" in options()
    assert "--no-enforce-eager" not in options("--enforce-eager")
    assert "--no-enforce-eager" not in options("--cpu")
    assert "--no-enable-prefix-caching" not in options()


def test_who_is_asked_what():
    given = parsed(["--flow", "parallel", "--in-flight", "16", "--cached"])
    waiting = Load(LOAD.tokens_in, LOAD.tokens_out)
    ours, nixl, plain = (one.job(waiting, 7, given) for one in (OURS, NIXL, PLAIN))
    assert (ours.prefill, ours.decode) == ("http://kvconnect-nixl-P", ("http://kvconnect-nixl-D",))
    assert (plain.prefill, plain.decode) == ("", ("http://plain-P", "http://plain-D"))
    assert (ours.is_parallel, nixl.is_parallel, plain.is_parallel) == (True, False, False)
    assert ours.prompts() == nixl.prompts() == plain.prompts()
    assert len(ours.prompts()) == ours.num_cached == given.prompts
    assert ours.in_flight == given.in_flight
    assert LOAD.rate_per_s
    arriving = OURS.job(LOAD, 7, given)
    assert (arriving.in_flight, arriving.num_cached) == (0, 0)


def test_only_those_that_share_no_gpu_are_measured_at_once():
    assert side_by_side([OURS, NIXL, PLAIN]) == [[OURS, NIXL], [PLAIN]]
    assert side_by_side([OURS, system("NixlConnector")]) == [[OURS], [system("NixlConnector")]]


def figures_of(first_token_s):
    return figures([Sample(1.0, 0.0, 0.2, 0.1, first_token_s, (0.01,))], {}, 8)


def test_rounds_and_what_is_told_of_them(monkeypatch, capsys):
    runs = []

    def measured(group, load, seed, pool, given):
        runs.append((tuple(one.name for one in group), load, seed))
        return {one.name: figures_of(len(runs) / 10) for one in group}

    monkeypatch.setattr(measure_load, "measured", measured)
    given = parsed(["--rounds", "2", "--load", "9:8:1", "--load", "7:6:2"])
    told = io.StringIO()
    measure_load.compare([OURS, NIXL, PLAIN], given, Lines(told, is_shown=False))
    both, plain = ("kvconnect-nixl", "NixlConnector"), ("plain",)
    # The other group goes first in the second round.
    assert [names for names, _, _ in runs] == [both, plain, plain, both] * 2
    seeds = [seed for _, _, seed in runs]
    # A round is the same for all, and no two rounds or loads are.
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    lines = [json.loads(line) for line in told.getvalue().splitlines()]
    kinds = [(line["kind"], line["connector"]) for line in lines if line["load"].startswith("9 in")]
    assert kinds.count(("run", "plain")) == 2
    assert kinds[-4:] == [("load", name) for name in (*both, *plain)] + [("ratio", "kvconnect-nixl")]
    (ratio,) = [line for line in lines if line["kind"] == "ratio" and line["load"].startswith("9 in")]
    assert ratio["first_token_ms"] == {"p50": 1, "p90": 1, "p99": 1}
    shown = capsys.readouterr().out
    assert shown.count("ratio to NixlConnector") == 2
    # Runs 1 and 4 of three systems: the median of 0.1 and 0.4 s.
    assert "first token, ms" in shown
    assert "250 / 250 / 250" in shown


def test_a_table_has_the_reasons_of_failures():
    failed = figures([Sample(1.0, error="D: HTTP 500"), Sample(1.0, error="D: HTTP 500")], {}, 8)
    lines = table(LOAD, {"kvconnect": failed, "plain": figures_of(0.5)}, {})
    assert lines[1].split("  ")[0] == "100 in, 8 out at 2/s (p50 / p90 / p99)"
    assert lines[-1] == "kvconnect: 2 x D: HTTP 500"
    (row,) = [line for line in lines if line.startswith("first token")]
    assert "-  " in row
    assert row.endswith("500 / 500 / 500")


def test_a_run_that_cannot_be_traced_is_a_run_all_the_same(tmp_path, capsys):
    port = free_port()
    ours = replace(system(), side_channels=(f"127.0.0.1:{port}",))
    measure_load._trace(ours, tmp_path / "trace", 6)
    assert capsys.readouterr().out == f"no trace of kvconnect-nixl: nothing listens at 127.0.0.1:{port}\n"
    measure_load._trace(system(), tmp_path / "trace", 6)
    assert not capsys.readouterr().out


@pytest.mark.full
@pytest.mark.timeout(900)
def test_real_servers(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")
    out = tmp_path / "lines"
    command = [sys.executable, "-m", "tests.vllm.measure_load", "--cpu", "--flow", "parallel", "--plain"]
    command += ["--load", "300:8:1", "--requests", "6", "--rounds", "1", "--json", str(out)]
    command += ["--traces", str(tmp_path / "traces")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    loads = {line["connector"]: line for line in lines if line["kind"] == "load"}
    assert loads.keys() == {"kvconnect-nixl", "NixlConnector", "plain"}, done.stdout[-3000:]
    for name, load in loads.items():
        assert (load["requests"], load["failed"]) == (6, 0), load["errors"]
        assert load["decode_gap_ms"]["p99"] > 0
        assert ("prefill_leg_ms" in load) is (name != "plain")
        if name != "plain":
            assert load["loads"] == 6
    (ratio,) = [line for line in lines if line["kind"] == "ratio"]
    assert ratio.keys() >= {"first_token_ms", "prefill_leg_ms", "decode_leg_ms", "load_ms", "decode_gap_ms"}
    assert "ratio to NixlConnector" in done.stdout
    (trace,) = (tmp_path / "traces").iterdir()
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("to reported") == 6
    assert f"6 requests are in {trace}" in done.stdout
