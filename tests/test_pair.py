"""A real pair behind a real router, each in its own process, and what a client may get wrong.

After each wrong request the nodes must still serve right ones, and nothing may be left over. Every reason
for a refusal is tried in process.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import signal
import subprocess
import time
from urllib.parse import urlsplit

import msgspec
import pytest

from kvconnect.config import ExtraConfig
from kvconnect.node.children import COMMAND, BadAnswer, Children, fetch_json, read_metrics
from kvconnect.node.pair_demo import ask
from kvconnect.peer.handles import Handles
from kvconnect.peer.keyring import load_keyring
from kvconnect.tools.inspect_runner import as_json, look
from kvconnect.tools.timelines import PHASES
from tests.pair_kit import (
    FOR_D,
    alone,
    assert_at_rest,
    grown,
    prefilled,
    prompt_of,
    route,
    serve,
    tokens,
    until,
)
from tests.ports import free_port

PROMPT = list(range(1, 201))
EXTRA = {"lease_s": 4, "peer_timeout_s": 4}
PORTS = {"prefill": free_port(), "decode": free_port()}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """P, D, two nodes of both roles that recompute, one alone, and a router."""
    with Children(tmp_path_factory.mktemp("pair")) as children:
        start = functools.partial(serve, children, **EXTRA)
        made = {
            "prefill": start("prefill", "kv_producer", port=PORTS["prefill"]),
            "decode": start("decode", "kv_consumer", *FOR_D, port=PORTS["decode"]),
            "both": start("both", "kv_both", policy="recompute"),
            "second": start("second", "kv_both", *FOR_D, policy="recompute"),
            "alone": alone(children),
        }
        urls = {name: child.wait_ready() for name, child in made.items()}
        yield {**urls, "router": route(children, [urls["prefill"]], [urls["decode"]])}


@pytest.fixture(scope="module")
def expected(nodes):
    return tokens(nodes["alone"], PROMPT)


@pytest.fixture(autouse=True)
def still_serving(request):
    yield
    if "nodes" in request.fixturenames:
        nodes = request.getfixturevalue("nodes")
        assert tokens(nodes["router"], PROMPT) == request.getfixturevalue("expected")
        assert_at_rest(*(nodes[name] for name in ("prefill", "decode", "both", "second")))


def refused(url, params, prompt):
    """The error that D's client gets, which must come in time."""
    started = time.monotonic()
    with pytest.raises(BadAnswer) as error:
        ask(url, "gqa", prompt, kv_transfer_params=params)
    assert time.monotonic() - started < 20, "a load has 60 s"
    return str(error.value)


@pytest.mark.parametrize(
    ("source", "target"),
    [("prefill", "decode"), ("both", "second"), ("second", "both")],
)
def test_both_legs_by_hand_are_exact_and_nothing_is_computed_twice(nodes, source, target, request):
    prompt = prompt_of(300, request.node.name)
    before = read_metrics(nodes[target])
    params = prefilled(nodes[source], prompt)
    assert tokens(nodes[target], prompt, kv_transfer_params=params) == tokens(nodes["alone"], prompt)
    assert grown(nodes[target], before, "transfers_total", direction="received", outcome="ok") == 1
    assert grown(nodes[target], before, "transfer_bytes_total", direction="received") > 0


def test_a_node_that_is_chosen_for_both_legs_answers_and_holds_nothing(nodes):
    prompt = prompt_of(300, "one for both")
    params = prefilled(nodes["both"], prompt)
    assert tokens(nodes["both"], prompt, kv_transfer_params=params) == tokens(nodes["alone"], prompt)
    # It lets go of what it holds for itself.
    until(lambda: not grown(nodes["both"], {}, "leases_held"), EXTRA["lease_s"] - 1)


def streaming(nodes, **body):
    parts = urlsplit(nodes["router"])
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    data = json.dumps({"model": "gqa", "stream": True, **body})
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    return connection


def test_streams_end_to_end(nodes, expected):
    connection = streaming(nodes, prompt=PROMPT, max_tokens=12)
    response = connection.getresponse()
    assert response.status == 200
    events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    # The text: ids are of those who ask for them, and the first token is the prefill node's.
    assert [int(token) for choice in choices for token in choice["text"].split()] == expected
    connection.close()


def test_a_client_that_leaves_frees_both_sides(nodes):
    for wait_s in (0.0, 0.02, 0.1, 0.3):
        connection = streaming(nodes, prompt=[9, *PROMPT, 9], max_tokens=500)
        time.sleep(wait_s)
        connection.close()


def test_a_router_ends_by_its_name_what_a_node_holds(nodes):
    url, name = nodes["prefill"], {"kvconnect_release": "a name that only the router knows"}
    for role, model in (("do_remote_decode", "gqa"), ("do_remote_prefill", "none that is served")):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": {role: True, **name}}
        fetch_json(url + "/v1/completions", body, 20)
        held = fetch_json(url + "/debug/state")["blocks"]["held"]
        assert held > 0 or role == "do_remote_prefill"
    assert_at_rest(url, within_s=EXTRA["lease_s"] - 1)


def signed_anew(params, **change):
    """P's parameters with other claims, signed with the key of this user as P's are."""
    handles = Handles(load_keyring(ExtraConfig(), os.environ).handle_secret, time.time)
    claims = msgspec.structs.replace(handles.read(params["kvconnect_handle"]), **change)
    repeated = {"remote_" + key: value for key, value in change.items() if "remote_" + key in params}
    return {**params, **repeated, "kvconnect_handle": handles.make(claims)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda params: signed_anew(params, name="made-up"), "no request is held under this handle"),
        (lambda params: signed_anew(params, expires_at=time.time() - 100), "it expired 100 s ago"),
        (lambda params: {**params, "remote_port": "56x0"}, "kv_transfer_params.remote_port is '56x0'"),
    ],
)
def test_parameters_of_no_use_are_refused_by_name(nodes, change, said, request):
    prompt = prompt_of(200, request.node.name)
    assert said in refused(nodes["decode"], change(prefilled(nodes["prefill"], prompt)), prompt)


@pytest.mark.parametrize("length", [201, 200])
def test_the_handle_of_another_prompt_is_left_to_that_one(nodes, length):
    """The decode node fails what it cannot load, but this is no load: the prompt is computed."""
    own, other = prompt_of(200, f"own {length}"), prompt_of(length, f"other {length}")
    params = prefilled(nodes["prefill"], own)
    before = read_metrics(nodes["decode"])
    assert tokens(nodes["decode"], other, kv_transfer_params=params) == tokens(nodes["alone"], other)
    assert grown(nodes["decode"], before, "transfers_total", direction="received") == 0
    assert grown(nodes["decode"], before, "failures_total", reason="prompt_differs") == 1
    assert tokens(nodes["decode"], own, kv_transfer_params=params) == tokens(nodes["alone"], own)
    assert grown(nodes["decode"], before, "transfers_total", direction="received", outcome="ok") == 1


def test_a_prompt_longer_than_the_cache(nodes):
    with pytest.raises(BadAnswer, match=r"answered 400.*500\d.*4096"):
        ask(nodes["router"], "gqa", [1] * 5000)


# --- what its tools show of it ---


def command(*arguments, **popen):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=250, **popen)


def test_what_the_nodes_did_is_traced_from_the_outside(nodes, tmp_path):
    for _ in range(3):
        assert tokens(nodes["router"], PROMPT)
    addresses, out = [f"127.0.0.1:{port}" for port in PORTS.values()], tmp_path / "trace.json"
    done = command("inspect", *addresses, "--last", "2", "--trace", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["load", *PHASES, "late", "request"]
    assert len(lines) == 4, "the head, the last two loads, and where the file is"
    events = json.loads(out.read_text())["traceEvents"]
    times = {event["name"]: event["ts"] + event.get("dur", 0) for event in events if event["ph"] in "Xe"}
    # Both nodes are of this machine, so that their clocks are one: each comes after the one before it.
    path = ["to prefill done", "to held", "to fetch sent", "to fetch begun", "write", "unpack"]
    path += ["to reported", "to loaded"]
    assert sorted(path, key=times.__getitem__) == path


def inspected(name):
    address = "127.0.0.1", PORTS[name]
    return as_json(name, *look(ExtraConfig(), load_keyring(ExtraConfig(), os.environ), address, whole=True))


def test_what_the_nodes_hold_is_seen_from_the_outside(nodes):
    assert tokens(nodes["router"], PROMPT)
    handle = prefilled(nodes["prefill"], PROMPT)["kvconnect_handle"]
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


def test_tables_of_a_node_are_for_people(nodes):
    done = command("inspect", nodes["decode"])
    assert (done.returncode, done.stderr) == (0, "")
    assert "kv_consumer" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_node_that_is_watched_is_shown_until_ctrl_c(nodes):
    watch = [*COMMAND, "inspect", f"127.0.0.1:{PORTS['prefill']}", "--watch", "--json"]
    # What a shell starts in the background ignores Ctrl-C, and so does what that starts.
    heeds = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(watch, stdout=pipe, stderr=pipe, text=True, preexec_fn=heeds) as watching:
        for _ in range(2):
            assert json.loads(watching.stdout.readline())["worker"]["role"] == "kv_producer"
        watching.send_signal(signal.SIGINT)
        _, said = watching.communicate(timeout=10)
    assert (watching.returncode, said) == (0, "")


# --- SIGTERM on a prefill node: what it holds can be fetched, and then it ends ---


@pytest.mark.parametrize("is_fetched", [True, False])
def test_what_is_held_can_be_fetched_before_the_node_ends(tmp_path, is_fetched):
    with Children(tmp_path) as children:
        drain_s = 20 if is_fetched else 1
        prefill = serve(children, "prefill", "kv_producer", lease_s=60, drain_s=drain_s)
        decode = serve(children, "decode", "kv_consumer") if is_fetched else prefill
        urls = [child.wait_ready() for child in (prefill, decode)]
        expected = tokens(urls[0], PROMPT)
        params = prefilled(urls[0], PROMPT)
        prefill.ask_to_end()
        if is_fetched:
            time.sleep(1.0)
            assert prefill.exit_code() is None, "it waits for whom it holds the request for"
            with pytest.raises(BadAnswer):
                tokens(urls[0], PROMPT)
            assert tokens(urls[1], PROMPT, kv_transfer_params=params) == expected
        # Nothing is held any more, or not for longer than it may.
        assert prefill.process.wait(18) == 0
