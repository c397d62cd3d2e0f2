"""``kvconnect check`` on real nodes, and ``kvconnect up`` with nodes in place of vLLM's servers."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.node.children import COMMAND, Children, answers
from kvconnect.node.pair_demo import start_nodes, start_router
from kvconnect.tools import transfer_check
from kvconnect.tools.inspect_runner import run_inspect
from kvconnect.tools.transfer_check import check, route_of, run_check
from tests.pair_kit import until
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Children(tmp_path_factory.mktemp("checked")) as children:
        prefill, decode = start_nodes(children, "nixl", "gqa", "serve", "--model", "gqa", "--port", "0")
        router = start_router(children, prefill, decode)
        yield prefill.url, decode.url, router.url


def test_a_pair_behind_a_router_is_shown_to_work(nodes, capsys):
    prefill, decode, router = nodes
    assert run_check([router + "/"], ExtraConfig(), json_output=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["problem"], found["prefill"], found["decode"]) == ("", prefill, decode)
    assert found["loaded_tokens"] == found["prompt_tokens"] == 1000
    assert found["total_bytes"] > 1000
    assert 0 < found["seconds"] < 60
    assert found["lane"] in ("tcp", "shared_memory"), "what UCX takes on this machine"
    assert found["answered_tokens"] == found["equal_tokens"] == 8


def test_two_servers_are_asked_one_after_the_other(nodes, capsys):
    prefill, decode, _ = nodes
    assert run_check([prefill, decode], ExtraConfig(), json_output=False) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"ok: {prefill} prefilled 1000 of 1000 tokens, their KV (")
    assert line.endswith("), which decoded 8 tokens, as it does by itself\n")


def test_servers_the_wrong_way_round_are_told_apart(nodes):
    prefill, decode, _ = nodes
    found = check(route_of([decode, prefill]), ExtraConfig())
    assert found.problem.startswith(f"{decode} holds no KV for a decode server")


def test_a_server_that_is_not_there_is_named(nodes):
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert nowhere in check(route_of([nodes[0], nowhere]), ExtraConfig()).problem
    with pytest.raises(ConfigError, match="is not `kvconnect router` before prefill and decode servers"):
        route_of([nodes[0]])
    with pytest.raises(ConfigError, match=r"'localhost:1'; accepted: a URL"):
        route_of(["localhost:1"])


def test_a_prompt_that_d_computed_itself_is_no_proof(nodes, monkeypatch):
    """As where a router passes P by: the answer is right all the same."""
    prefill, decode, _ = nodes
    whole = transfer_check.complete

    def without_params(url, *arguments, **more):
        if url == decode:
            more.pop("kv_transfer_params", None)
        return whole(url, *arguments, **more)

    monkeypatch.setattr(transfer_check, "complete", without_params)
    assert "no decode server loaded KV" in check(route_of([prefill, decode]), ExtraConfig()).problem


@pytest.mark.parametrize(
    ("turned", "place", "line"),
    [
        # The answers of the first prompt, of all but the third, and of all.
        ((0,), 3, "tokens, as it does by itself"),
        ((0, 1, 3), 0, "tokens, as it does by itself"),
        ((0, 1, 2, 3), 3, "tokens, the first 3 as it does by itself"),
        ((0, 1, 2, 3), 0, "they differ from token 1 on"),
    ],
)
def test_answers_other_than_ds_own_are_found(nodes, monkeypatch, turned, place, line):
    """Rounding turns later tokens, or those of one prompt; wrong KV the first of most."""
    prefill, decode, _ = nodes
    whole, number = transfer_check.complete, itertools.count()

    def altered(url, *arguments, **more):
        answer = whole(url, *arguments, **more)
        if "cache_salt" in more and next(number) in turned:
            answer["choices"][0]["token_ids"][place] += 1
        return answer

    monkeypatch.setattr(transfer_check, "complete", altered)
    monkeypatch.setattr(transfer_check, "_CHARACTERS", 100)
    assert line in str(check(route_of([prefill, decode]), ExtraConfig()))


def test_a_request_that_a_worker_does_not_know_is_said_not_to_be_there(nodes, capsys):
    _, decode, router = nodes
    assert run_check([router], ExtraConfig(), json_output=False) == 0
    for request, is_known in (("kvconnect-check-", True), ("of no one [b]", False)):
        assert run_inspect([decode], ExtraConfig(), request=request, watch=False, json_output=False) == 0
        assert (f"holds nothing of {request}" in " ".join(capsys.readouterr().out.split())) is not is_known


# kvconnect up

CHILD = """
import json, sys
from kvconnect.tools.local_pair import ServerCommand, LocalPair
from kvconnect.tools.up_runner import run_pair
launches = [ServerCommand(**one) for one in json.loads(sys.argv[1])]
sys.exit(run_pair(LocalPair(*launches, one_by_one=sys.argv[2] == "1"), "gqa"))
"""


IDLE = (sys.executable, "-c", "import time; time.sleep(60)")
"""A server that never serves."""


def launched(model="gqa", serve=(*COMMAND, "serve")):
    """As ``kvconnect up`` would start them, with nodes as servers."""
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(3)]
    made = []
    for name, role, url in (("prefill", "kv_producer", urls[0]), ("decode", "kv_consumer", urls[1])):
        config = json.dumps({"kv_connector": "KVConnect", "kv_role": role})
        command = [*serve, "--model", model, "--port", url.rpartition(":")[2]]
        made.append({"name": name, "url": url, "command": [*command, "--kv-transfer-config", config]})
    route = [*COMMAND, "router", "--port", urls[2].rpartition(":")[2]]
    route += ["--prefill", urls[0], "--decode", urls[1]]
    return [*made, {"name": "router", "url": urls[2], "command": route}]


def begun(launches, *, one_by_one=False):
    command = [sys.executable, "-c", CHILD, json.dumps(launches), str(int(one_by_one))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def are_gone(launches):
    """Whether no process of these commands is left."""
    ports = [f"--port\0{one['url'].rpartition(':')[2]}\0" for one in launches]
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_text()
    return not any(port in found for port in ports)


def test_up_shows_where_kv_came_from_and_ends_all_with_itself():
    launches = launched()
    process = begun(launches, one_by_one=True)
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("curl "):
                break
        assert any(line.startswith(f"ok: {launches[0]['url']} prefilled ") for line in lines), "".join(lines)
        assert sum("--kv-transfer-config" in line for line in lines) == 2
        assert answers(launches[2]["url"] + "/ready?all")
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
    until(lambda: are_gone(launches))


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_no_process_stays_behind_when_up_is_ended_at_any_moment(after_s):
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
    each = [launched(serve=IDLE) for _ in numbers]
    processes = [begun(launches) for launches in each]
    for process in processes:
        process.stdout.readline()
    time.sleep(after_s)
    for process, number in zip(processes, numbers, strict=True):
        process.send_signal(number)
    assert [process.wait(60) for process in processes] == [0, 0, -signal.SIGKILL]
    until(lambda: all(map(are_gone, each)))


def test_a_server_that_ends_ends_up_with_the_end_of_its_log():
    launches = launched(model="no_such_model")
    process = begun(launches)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ended with code 2" in out
    assert "no_such_model" in out
    until(lambda: are_gone(launches))
