"""``kvconnect serve`` as a process: how it ends, and what it uses when idle."""

import signal
import socket
import threading
import time

import pytest

from kvconnect.node.children import Children, fetch_json, growth, read_metrics
from kvconnect.node.node_connector import Connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.serving import build_engine
from tests.node.node_harness import CopyConnector, make_client, make_prompt

PROMPT = make_prompt(50)
PRODUCER = '{"kv_role": "kv_producer", "kv_connector_extra_config": {"engine": "memory"}}'


@pytest.fixture
def serve(tmp_path):
    """Starts a node of its own with these options."""
    common = ("--model", "mla", "--num-blocks", "300", "--port", "0", "--num-threads", "1")
    with Children(tmp_path) as children:
        yield lambda *options: children.start("node", "serve", *common, *options)


def complete(url, **body):
    return fetch_json(url + "/v1/completions", {"prompt": PROMPT, **body}, 20.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_served_node_ends_on_a_signal_and_leaves_nothing(serve, number):
    node = serve()
    url = node.wait_ready()
    asked = []
    asking = threading.Thread(target=lambda: asked.append(complete(url, max_tokens=60)))
    asking.start()
    node.wait_until(lambda: fetch_json(url + "/debug/state")["requests"]["running"], 5)
    node.send(number)
    asking.join()
    # What was in flight is answered first.
    assert len(asked[0]["choices"][0]["token_ids"]) == 60
    assert node.process.wait(15) == 0
    socket.create_server(("127.0.0.1", int(url.rpartition(":")[2]))).close()
    assert "Traceback" not in node.output()


def test_a_second_signal_ends_a_node_that_waits_for_a_lease(serve):
    """The first one says what is awaited, and for how long: 30 s by default."""
    node = serve("--kv-transfer-config", PRODUCER)
    url = node.wait_ready()
    answer = complete(url, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    assert answer["kv_transfer_params"]
    # The order to hold travels to another thread.
    deadline = time.monotonic() + 10
    while not growth({}, read_metrics(url), "kvconnect_leases_held"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    node.send(signal.SIGINT)
    time.sleep(1.0)
    assert node.exit_code() is None
    node.send(signal.SIGINT)
    assert node.process.wait(10) == 0
    assert "1 requests are held for peers, which may fetch them for 30 s more" in node.output()
    assert "a second signal ends the node at once" in node.output()


@pytest.mark.parametrize("outstanding", [False, True])
def test_an_idle_node_uses_no_processor(outstanding):
    connector = CopyConnector(hold_loads=True)
    engine = build_engine(NodeOptions(num_blocks=64), Connector(connector, connector))
    engine.start()
    client_request = make_client().submit("r", PROMPT, 4, {"do_remote_prefill": True})
    if outstanding:
        engine.submit(client_request)
    time.sleep(0.3)
    # Of the engine's thread: what earlier tests have left behind in this process is not the node's.
    clock = time.pthread_getcpuclockid(engine._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(1.2)
    used = time.clock_gettime(clock) - before
    assert engine.snapshot["requests"]["waiting_for_kv"] == int(outstanding)
    engine.stop()
    assert used < 0.03
