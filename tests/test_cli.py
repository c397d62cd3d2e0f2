"""The command line from outside, the demo's judgement, and one whole run of the demo each way."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvconnect
from kvconnect import cli
from kvconnect.config import parse_kv_transfer_config
from kvconnect.node import children
from kvconnect.node import pair_demo as demo
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.pair_demo import DemoOptions, PairOutcome, Tokens
from tests.nursery import nodes_forked

ROOT = Path(__file__).parents[1]


# --- the command line -----------------------------------------------------------------------------


def test_the_version_is_the_packages() -> None:
    command = [*children.COMMAND, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, f"kvconnect {kvconnect.__version__}\n")


def test_the_command_line_itself_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "aiohttp", "zmq")
    code = f"import sys, kvconnect.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("serve", "--kv-transfer-config", "{"), "kv_transfer_config is not JSON"),
        (
            ("serve", "--kv-transfer-config", '{"kv_role": "kv_producer", "kv_rol": 1}'),
            "did you mean 'kv_role'",
        ),
        (("serve", "--model", "nope"), "'nope'"),
        (("serve", "--device", "tpu"), "device is 'tpu'"),
        (("router", "--prefill", "http://a", "--decode", "b"), "'b' is not the URL of a node"),
        (
            ("router", "--prefill", "http://a", "--decode", "http://b", "--prefill-timeout-s", "0"),
            "prefill_timeout_s",
        ),
        (
            ("router", "--prefill", "http://a", "--decode", "http://b", "--flow", "both"),
            "flow is 'both'; accepted: sequential, parallel",
        ),
        (("demo", "--engine", "nope"), "engine 'nope' is unknown; choose from mooncake, nixl"),
        (("demo", "--model", "nope"), "model 'nope' is unknown"),
        (("demo", "--requests", "0"), "requests is 0, it must be at least 1"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(arguments, names, tmp_path) -> None:
    command = [*children.COMMAND, *arguments]
    child = children.Child("wrong", command, tmp_path / "log", children.ENVIRONMENT).start()
    assert child.process.wait(60) == 2
    assert names in child.output()
    assert re.fullmatch(r"kvconnect: .*\n", child.output())


@pytest.mark.parametrize(
    ("arguments", "blocked", "names"),
    [
        (("router", "--decode", "http://a"), "aiohttp", "pip install 'kvconnect[node]'"),
        (("serve",), "aiohttp", "pip install 'kvconnect[node]'"),
        (("demo",), "aiohttp", "pip install 'kvconnect[node]'"),
        (("demo",), "nixl mooncake", "pip install 'kvconnect[nixl]'"),
        (("doctor",), "torch", "pip install torch"),
    ],
)
def test_a_package_that_is_not_installed_is_one_line_and_exit_code_2(arguments, blocked, names) -> None:
    code = f"import sys\nfor name in {blocked.split()}: sys.modules[name] = None\n"
    code += "from kvconnect.cli import main\nmain()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=250)
    assert done.returncode == 2, done.stderr
    assert names in done.stderr
    assert re.fullmatch(r"kvconnect: .*\n", done.stderr)


def test_serve_passes_every_argument_of_the_node(monkeypatch) -> None:
    import kvconnect.node.serving as node

    seen: dict[str, object] = {}

    def serve(options: NodeOptions, **arguments: object) -> None:
        seen.update(asdict(options), **arguments)

    monkeypatch.setattr(node, "serve", serve)
    options = ["--port", "0", "--kv-transfer-config", "{}", "--block-size", "32", "--reserved-blocks", "5"]
    assert CliRunner().invoke(cli.app, ["serve", *options, "--no-enable-prefix-caching"]).exit_code == 0
    assert set(seen) == set(inspect.signature(cli.serve).parameters)
    assert (seen["port"], seen["kv_transfer_config"], seen["block_size"]) == (0, "{}", 32)
    assert (seen["reserved_blocks"], seen["enable_prefix_caching"]) == (5, False)


def test_an_address_that_cannot_be_served_on_is_a_configuration_error(monkeypatch) -> None:
    import kvconnect.node.serving as node

    def refuses(*_options: object, **_arguments: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(node, "serve", refuses)
    result = CliRunner().invoke(cli.app, ["serve", "--port", "1"])
    assert "cannot serve on 127.0.0.1:1" in str(result.exception)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.json")), ids=lambda path: path.name)
def test_the_example_configurations_are_valid(path: Path) -> None:
    config = parse_kv_transfer_config(path.read_text())
    assert config.is_producer is ("prefill" in path.name)
    assert config.is_consumer is ("decode" in path.name)
    assert config.kv_connector_module_path == "kvconnect.vllm"


# --- what the demo asks and how it judges ---------------------------------------------------------


def test_prompts_are_seeded_and_none_continues_into_another() -> None:
    made = demo.make_prompts(16, 7)
    assert made == demo.make_prompts(16, 7)
    assert made != demo.make_prompts(16, 8)
    lengths = {len(prompt) for prompt in made}
    assert {1, 128} <= lengths
    assert any(1 < length < 16 for length in lengths)
    assert max(lengths) > 300
    assert all(0 <= token < demo.VOCAB for prompt in made for token in prompt)
    for one in made:
        for other in made:
            assert one is other or len(one) == 1 or other[: len(one)] != one
    shared = [prompt for prompt in made if prompt[:128] == made[3][:128]]
    assert len(shared) >= 2


def test_a_difference_is_named_and_a_failure_is_never_equality() -> None:
    same = Tokens([1, 2], [3])
    assert demo.difference(same, Tokens([1, 2], [3])) == ""
    assert "place 1: 2 from the pair, 9 from" in demo.difference(same, Tokens([1, 9], [3]))
    assert "place 1: nothing from the pair" in demo.difference(Tokens([1], [3]), same)
    assert "draft tokens differ" in demo.difference(Tokens([1, 2], [4]), same)
    assert "draft tokens differ" in demo.difference(Tokens([1, 2], None), same)
    failed = children.BadAnswer("gone")
    assert demo.difference(failed, failed) == "the single node failed: gone"
    assert demo.difference(failed, same) == "the pair failed: gone"
    assert demo.difference(Tokens([], None), Tokens([], None)) != ""


METRICS = """# HELP kvconnect_transfers_total x
kvconnect_transfers_total{direction="received",outcome="ok"} %s
kvconnect_transfers_total{direction="received",outcome="failed"} %s
kvconnect_transfers_total{direction="sent",outcome="ok"} 99.0
kvconnect_transfer_bytes_total{direction="received",lane="tcp"} %s
kvconnect_transfer_bytes_total{direction="received",lane="rdma"} 5.0
kvconnect_transfer_seconds_total{direction="received"} %s
"""


def judged(ok: float, failed: float, moved: float, seconds: float) -> PairOutcome:
    made = PairOutcome(engine="memory", model="gqa", requests=3)
    before = children.parse_metrics(METRICS % (1, 0, 1e9, 1))
    after = children.parse_metrics(METRICS % (1 + ok, failed, 1e9 + moved, 1 + seconds))
    demo.judge_transfer(made, before, after, [[1], [1, 2], [1, 2, 3]])
    return made


def test_only_the_growth_of_the_counters_counts() -> None:
    good = judged(2, 0, 2e9, 0.5)
    assert good.problems == []
    assert (good.kv_bytes, good.transfer_s, good.lane) == (2_000_000_000, 0.5, "tcp")
    assert judged(1, 0, 2e9, 0.5).problems == ["2 prompts need KV of the prefill node, but 1 received some"]
    assert judged(2, 1, 2e9, 0.5).problems == ["1 transfers failed"]
    assert "0 bytes" in judged(2, 0, 0, 0.5).problems[0]


def test_a_line_of_the_demo_fits_80_columns_and_has_no_rate_of_tiny_models(capsys) -> None:
    pair = PairOutcome(engine="mooncake", model="sliding", requests=128, token_exact=128, seconds=100.0)
    pair.kv_bytes, pair.lane = 123_456_789, "shared_memory"
    pair.report(json_output=False)
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 80, line
    assert line.startswith("ok     mooncake/sliding 128 of 128 exact, 123 MB over shared_memory")


def test_an_engine_that_cannot_run_is_skipped_with_its_reason_unless_named(monkeypatch, capsys) -> None:
    reasons = {"mooncake": "apt-get install libibverbs1", "nixl": ""}
    monkeypatch.setattr("kvconnect.engine.registry.available_engines", lambda: reasons)
    ran: list[str] = []
    monkeypatch.setattr(demo, "_run_model", lambda engines, *_: ran.extend(engines) or [])
    everything = DemoOptions(model=["gqa"], requests=1)
    assert demo.run_demo(everything, json_output=True) == 0
    assert ran == ["nixl"]
    assert "mooncake is skipped: apt-get install libibverbs1" in capsys.readouterr().err
    for named in (["mooncake"], ["nixl", "mooncake"]):
        with pytest.raises(kvconnect.errors.ConfigError, match="libibverbs1"):
            demo.run_demo(replace(everything, engine=named))
    assert ran == ["nixl"]
    reasons["nixl"] = "pip install nixl"
    with pytest.raises(kvconnect.errors.ConfigError, match="libibverbs1; .*'nixl' cannot run here: pip"):
        demo.run_demo(everything)


# --- the demo, whole ------------------------------------------------------------------------------


def test_the_demo_is_exact_and_says_so_in_json() -> None:
    options = ["--engine", "nixl", "--model", "gqa", "--requests", "5", "--json"]
    done = CliRunner().invoke(cli.app, ["demo", *options])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    said = [found[name] for name in ("engine", "model", "requests", "token_exact")]
    assert said == ["nixl", "gqa", 5, 5]
    assert found["kv_bytes"] > 0
    assert found["transfer_s"] > 0
    assert found["lane"]


FLIP_IN_A_PAGE = """
import ctypes
from kvconnect.pack.packer import Packer

unpack, flipped = Packer.unpack, []

def unpack_and_flip(self, slot, staged, seed, coder):
    ticket = unpack(self, slot, staged, seed, coder)
    # A page of a long prompt: of a short one, what lies behind its last token is never read, and the
    # last token itself is computed anew. The digest is of what came.
    if not flipped and staged.total_bytes > 200_000:
        flipped.append(True)
        ctypes.c_uint8.from_address(slot + 1).value ^= 1
        unpack(self, slot, staged, seed)
    return ticket

Packer.unpack = unpack_and_flip
"""

FLIP_IN_A_SLOT = """
import ctypes
from kvconnect.pack.packer import Packer
from kvconnect.transfer import local

# One byte is found for sure by digests of all there is.
local.CPU_DIGEST_SAMPLE = 1
pack, flipped = Packer.pack, []

def pack_and_flip(self, slot, staged, seed, coder):
    ticket = pack(self, slot, staged, seed, coder)
    if not flipped and staged.total_bytes > 20_000:
        flipped.append(True)
        ctypes.c_uint8.from_address(slot + staged.total_bytes // 2).value ^= 1
    return ticket

Packer.pack = pack_and_flip
"""


@pytest.mark.parametrize(
    ("flip", "said"),
    [(FLIP_IN_A_PAGE, "tokens differ at place"), (FLIP_IN_A_SLOT, "landed with another digest")],
    ids=["in a page", "in a slot"],
)
def test_one_flipped_byte_fails_the_demo(flip, said, tmp_path, monkeypatch, capfd) -> None:
    pytest.importorskip("nixl")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with nodes_forked(before=flip):
        code = demo.run_demo(DemoOptions(["nixl"], ["gqa"], requests=4), json_output=True)
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert code == 1
    assert found["token_exact"] == 3
    assert sum(problem.startswith("prompt") for problem in found["problems"]) == 1
    # What is in a page shows in the tokens; what is in a slot never gets that far.
    assert said in err


def children_of(pid: int) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[1]) == pid and fields[0] != "Z":
            found.add(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_the_demo(number: signal.Signals, tmp_path) -> None:
    command = [sys.executable, "-m", "kvconnect", "demo", "--engine", "nixl", "--model", "gqa"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Whoever runs the tests in the background has them ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 90
        while len(started := children_of(process.pid)) < 3:
            assert time.monotonic() < deadline, "the demo started no nodes"
            time.sleep(0.05)
        time.sleep(0.5)  # let them become what they are to be
        process.send_signal(number)
        assert process.wait(90) != 0
        while any(Path(f"/proc/{pid}").exists() for pid in started):
            assert time.monotonic() < deadline + 90, "a child outlives the demo"
            time.sleep(0.05)
        if number is not signal.SIGKILL:
            assert list(tmp_path.glob("kvconnect-demo-*")) == [], "its logs are left behind"
    finally:
        process.kill()
        process.wait(5)
