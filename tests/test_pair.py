"""A real pair behind a real router, each in its own process, and everything a client may get wrong.

After each wrong request the nodes must still serve right ones, and nothing may be left over.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from urllib.parse import urlsplit

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.node.children import COMMAND, BadAnswer, Children, fetch_json, growth, read_metrics
from kvconnect.node.demo import PROTOCOLS, ask
from kvconnect.peer.handles import Handles
from kvconnect.peer.keyring import load_keyring
from kvconnect.tools.inspect_runner import as_json, look
from kvconnect.tools.timelines import PHASES
from tests.ports import free_port

PROMPT = list(range(1, 201))
DEADLINE_S = 6
EXTRA = {"lease_s": 4, "peer_timeout_s": 4}
PORTS = {"prefill": free_port(), "decode": free_port()}
ASK_FOR_KV = {"do_remote_decode": True, "do_remote_prefill": False}


def node_options(name, role, **config):
    transfer = {
        "kv_connector": "KVConnect",
        "kv_role": role,
        "engine_id": name,
        "kv_connector_extra_config": {
            "engine": "nixl",
            "protocol": PROTOCOLS["nixl"],
            "port": PORTS.get(name, 0),
            **EXTRA,
        },
        **config,
    }
    return ["serve", "--model", "gqa", "--port", "0", "--kv-transfer-config", json.dumps(transfer)]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """P, D, D that recomputes, a P with other weights, a node alone, and a router before P and D."""
    with Children(tmp_path_factory.mktemp("pair")) as children:
        made = {
            "prefill": children.start("prefill", *node_options("prefill", "kv_producer")),
            "decode": children.start(
                "decode", *node_options("decode", "kv_consumer"), "--reserved-blocks", "61"
            ),
            "recomputing": children.start(
                "recomputing",
                *node_options("recomputing", "kv_consumer", kv_load_failure_policy="recompute"),
            ),
            "other": children.start("other", *node_options("other", "kv_producer"), "--seed", "1"),
            "alone": children.start("alone", "serve", "--model", "gqa", "--port", "0"),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        router = children.start(
            "router", "router", "--port", "0", "--prefill", urls["prefill"], "--decode", urls["decode"]
        )
        urls["router"] = router.wait_ready()
        until_ready(urls["router"])
        yield urls


def until_ready(url):
    for _ in range(100):
        try:
            return fetch_json(url + "/ready?all")
        except BadAnswer:
            time.sleep(0.1)
    raise AssertionError("the router found no nodes")


@pytest.fixture(scope="module")
def expected(nodes):
    return ask(nodes["alone"], "gqa", PROMPT)["choices"][0]["token_ids"]


@pytest.fixture(autouse=True)
def still_serving(nodes, expected):
    yield
    assert ask(nodes["router"], "gqa", PROMPT)["choices"][0]["token_ids"] == expected
    for name in ("prefill", "decode", "recomputing", "other"):
        assert_at_rest(nodes[name])


def assert_at_rest(url, timeout_s=15):
    deadline = time.monotonic() + timeout_s
    while True:
        state = fetch_json(url + "/debug/state")
        left = {key: state["connector"][key] for key in ("leases", "sendings", "loads")}
        if state["blocks"]["held"] == 0 and not any(left.values()):
            return
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def prefilled(url, prompt=PROMPT):
    answer = ask(url, "gqa", prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    return answer["kv_transfer_params"]


def refused(url, params, prompt=PROMPT):
    """The error that D's client gets, which must come in time."""
    started = time.monotonic()
    with pytest.raises(BadAnswer) as error:
        ask(url, "gqa", prompt, kv_transfer_params=params)
    assert time.monotonic() - started < DEADLINE_S
    return str(error.value)


def test_both_legs_by_hand_are_exact_and_nothing_is_computed_twice(nodes, expected):
    # A prompt that no other test uses: D must not have it in its prefix cache.
    prompt = [7, *PROMPT]
    alone = ask(nodes["alone"], "gqa", prompt)["choices"][0]["token_ids"]
    before = read_metrics(nodes["decode"])
    answer = ask(nodes["decode"], "gqa", prompt, kv_transfer_params=prefilled(nodes["prefill"], prompt))
    assert answer["choices"][0]["token_ids"] == alone
    after = read_metrics(nodes["decode"])
    assert growth(before, after, "kvconnect_transfers_total", direction="received", outcome="ok") == 1
    assert growth(before, after, "kvconnect_transfer_bytes_total", direction="received") > 0


def test_streams_end_to_end(nodes, expected):
    parts = urlsplit(nodes["router"])
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    body = {"model": "gqa", "prompt": PROMPT, "max_tokens": 12, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    events = [
        line.removeprefix("data: ")
        for line in response.read().decode().splitlines()
        if line.startswith("data: ")
    ]
    assert events[-1] == "[DONE]"
    tokens = [
        token
        for event in events[:-1]
        for choice in json.loads(event)["choices"]
        for token in choice.get("token_ids") or []
    ]
    assert tokens == expected
    connection.close()


def test_a_client_that_leaves_frees_both_sides(nodes):
    parts = urlsplit(nodes["router"])
    for wait_s in (0.0, 0.02, 0.1, 0.3):
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        body = {"model": "gqa", "prompt": [9, *PROMPT, 9], "max_tokens": 500, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        time.sleep(wait_s)
        connection.close()


def signed_anew(params, **change):
    """P's parameters with other claims, signed with the key of this user as P's are."""
    keyring = load_keyring(ExtraConfig(), os.environ)
    handles = Handles(keyring.handle_secret, time.time)
    claims = msgspec.structs.replace(handles.read(params["kvconnect_handle"]), **change)
    repeated = {"remote_" + key: value for key, value in change.items() if "remote_" + key in params}
    return {**params, **repeated, "kvconnect_handle": handles.make(claims)}


def test_an_unknown_handle(nodes):
    prompt = [3, *PROMPT[1:]]
    params = prefilled(nodes["prefill"], prompt)
    said = refused(nodes["decode"], signed_anew(params, name="made-up"), prompt)
    assert "no request is held under this handle" in said


def test_a_handle_that_p_did_not_sign(nodes):
    params = prefilled(nodes["prefill"])
    for handle in ("made-up", params["kvconnect_handle"][:-1]):
        said = refused(nodes["decode"], {**params, "kvconnect_handle": handle}, [21, *PROMPT[1:]])
        assert "kv_transfer_params.kvconnect_handle is of no use" in said


def test_a_client_cannot_send_d_to_another_address(nodes):
    prompt = [22, *PROMPT[1:]]
    params = prefilled(nodes["prefill"], prompt)
    elsewhere = {**params, "remote_host": "192.0.2.1", "remote_port": 1}
    assert ask(nodes["decode"], "gqa", prompt, kv_transfer_params=elsewhere), "the handle says where it is"
    announced = {"do_remote_prefill": True, "transfer_id": "t", "remote_host": "192.0.2.1", "remote_port": 1}
    said = refused(nodes["decode"], announced, [23, *PROMPT[1:]])
    assert "192.0.2.1:1, which no signed handle has named" in said


def test_a_handle_whose_time_is_over(nodes):
    prompt = [24, *PROMPT[1:]]
    params = prefilled(nodes["prefill"], prompt)
    said = refused(nodes["decode"], signed_anew(params, expires_at=time.time() - 100), prompt)
    assert "it expired 100 s ago" in said


def test_a_handle_that_was_used_already(nodes):
    prompt = [11, *PROMPT]
    params = prefilled(nodes["prefill"], prompt)
    # Another node, or D would take it from its prefix cache.
    ask(nodes["recomputing"], "gqa", prompt, kv_transfer_params=params)
    assert "no longer held" in refused(nodes["decode"], params, prompt)


def test_parameters_of_no_use(nodes):
    params = prefilled(nodes["prefill"])
    said = refused(nodes["decode"], {**params, "remote_port": "56x0"}, [4, *PROMPT[1:]])
    assert "kv_transfer_params.remote_port is '56x0'" in said


@pytest.mark.parametrize("other", [[5, *PROMPT], [5, *PROMPT[1:]]], ids=["longer", "as long"])
def test_the_handle_of_another_prompt_is_left_to_that_one(nodes, other):
    """The decode node fails what it cannot load, but this is no load: the prompt is computed."""
    alone, right = (ask(nodes["alone"], "gqa", prompt) for prompt in (other, prompt_of_its_own(other)))
    params = prefilled(nodes["prefill"], prompt_of_its_own(other))
    before = read_metrics(nodes["decode"])
    answer = ask(nodes["decode"], "gqa", other, kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    after = read_metrics(nodes["decode"])
    assert growth(before, after, "kvconnect_transfers_total", direction="received") == 0
    assert growth(before, after, "kvconnect_failures_total", reason="prompt_differs") == 1
    answer = ask(nodes["decode"], "gqa", prompt_of_its_own(other), kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == right["choices"][0]["token_ids"]
    loaded = read_metrics(nodes["decode"])
    assert growth(after, loaded, "kvconnect_transfers_total", direction="received", outcome="ok") == 1


def prompt_of_its_own(other):
    """One that no other test uses, and D does not have in its prefix cache."""
    return [15, len(other) % 256, *PROMPT[2:]]


def test_a_prefill_node_that_is_not_there(nodes):
    prompt = [6, *PROMPT[1:]]
    params = prefilled(nodes["prefill"], prompt)
    port = free_port()
    said = refused(nodes["decode"], signed_anew(params, port=port), prompt)
    assert f"nothing listens at 127.0.0.1:{port}" in said


def test_a_prefill_node_that_accepts_and_stays_silent(nodes):
    prompt = [8, *PROMPT[1:]]
    params = prefilled(nodes["prefill"], prompt)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        said = refused(nodes["decode"], signed_anew(params, port=port), prompt)
    assert "did not answer the greeting within 2.0 s" in said


def test_two_nodes_with_different_weights(nodes):
    prompt = [13, *PROMPT[1:]]
    said = refused(nodes["decode"], prefilled(nodes["other"], prompt), prompt)
    assert "peer has other weights" in said
    assert "seed=0" in said
    assert "seed=1" in said


def test_recompute_serves_what_could_not_be_loaded(nodes):
    prompt = [14, *PROMPT]
    alone = ask(nodes["alone"], "gqa", prompt)["choices"][0]["token_ids"]
    params = {**prefilled(nodes["prefill"], prompt), "kvconnect_handle": "made-up"}
    answer = ask(nodes["recomputing"], "gqa", prompt, kv_transfer_params=params)
    assert answer["choices"][0]["token_ids"] == alone


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_a_prompt_longer_than_the_cache(nodes, role):
    with pytest.raises(BadAnswer, match="answered 400") as error:
        ask(nodes[role], "gqa", [1] * 5000)
    assert "5000" in str(error.value)
    assert "4096" in str(error.value)


def test_what_the_nodes_did_is_traced_from_the_outside(nodes, tmp_path):
    for _ in range(3):
        assert ask(nodes["router"], "gqa", PROMPT)["choices"]
    addresses, out = [f"127.0.0.1:{port}" for port in PORTS.values()], tmp_path / "trace.json"
    command = [*COMMAND, "inspect", *addresses, "--last", "2", "--trace", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["load", *PHASES, "late", "request"]
    assert len(lines) == 4, "the head, the last two loads, and where the file is"
    events = json.loads(out.read_text())["traceEvents"]
    times = {event["name"]: event["ts"] + event["dur"] for event in events if event["ph"] == "X"}
    # Both nodes are of this machine, so that their clocks are one: each comes after the one before it.
    path = ["to prefill done", "to held", "to fetch sent", "to fetch begun", "write", "unpack"]
    path += ["to reported", "to loaded", "to first token"]
    assert sorted(path, key=times.__getitem__) == path


def test_what_the_nodes_hold_is_seen_from_the_outside(nodes):
    assert ask(nodes["router"], "gqa", PROMPT)["choices"]
    handle = prefilled(nodes["prefill"])["kvconnect_handle"]
    # Before the lease is over, which is sooner than a command may take to start.
    held, fetched = inspected("prefill"), inspected("decode")
    assert handle not in held
    held, fetched = json.loads(held), json.loads(fetched)
    assert (held["worker"]["role"], fetched["worker"]["role"]) == ("kv_producer", "kv_consumer")
    (lease,) = held["holds"]["leases"]
    assert (lease["state"], lease["tokens"]) == ("held", len(PROMPT))
    assert 0 < lease["left_s"] < EXTRA["lease_s"]
    (inbound,) = [peer for peer in held["holds"]["peers"] if peer["engine_id"] == "decode"]
    assert inbound["direction"] == "sent"
    # Other tests name this engine at addresses where it is not.
    known = {peer["address"]: peer["met"] for peer in fetched["holds"]["peers"]}
    assert known[f"127.0.0.1:{PORTS['prefill']}"] == "a request named it"
    assert fetched["holds"]["latest"][0]["moment"]


def inspected(name):
    address = "127.0.0.1", PORTS[name]
    return as_json(name, *look(ExtraConfig(), load_keyring(ExtraConfig(), os.environ), address, whole=True))


def test_tables_of_a_node_are_for_people(nodes):
    command = [*COMMAND, "inspect", nodes["decode"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kv_consumer" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_node_that_is_watched_is_shown_until_ctrl_c(nodes):
    command = [*COMMAND, "inspect", f"127.0.0.1:{PORTS['prefill']}", "--watch", "--json"]
    # What a shell starts in the background ignores Ctrl-C, and so does what that starts.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heeds
    ) as watching:
        for _ in range(2):
            assert json.loads(watching.stdout.readline())["worker"]["role"] == "kv_producer"
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=10)
    assert (watching.returncode, said) == (0, "")
