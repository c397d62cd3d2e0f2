"""``kvconnect serve`` as a process: how it ends, and what it uses when idle."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from kvconnect.node.children import fetch_json
from kvconnect.node.node_connector import Connector
from kvconnect.node.node_options import NodeOptions
from kvconnect.node.serving import build_engine
from tests.node.node_harness import CopyConnector, make_client, make_prompt

PROMPT = make_prompt(50)
PRODUCER = '{"kv_role": "kv_producer", "kv_connector_extra_config": {"engine": "memory"}}'
SERVE = "import sys; from kvconnect.cli import main; sys.argv[1:1] = ['serve', '--num-threads', '1']; main()"


class Served:
    """``kvconnect serve`` in a process group of its own."""

    def __init__(self, *options, wait=True):
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "--model", "mla", "--num-blocks", "300", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        if wait:
            found = re.search(r"ready on (http://\S+)", self.process.stdout.readline())
            self.url = found[1]
            self.port = int(self.url.rpartition(":")[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def complete(self, timeout_s=20.0, **body):
        return fetch_json(self.url + "/v1/completions", {"prompt": PROMPT, **body}, timeout_s)

    def end(self, timeout_s=15.0):
        """Its exit code and what it said."""
        code = self.process.wait(timeout_s)
        return code, self.process.stderr.read()


def until(true, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.01)
    return False


def can_bind(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_served_node_ends_on_a_signal_and_leaves_nothing(number):
    with Served() as node:
        asked = []
        asking = threading.Thread(target=lambda: asked.append(node.complete(max_tokens=60)))
        asking.start()
        until(lambda: fetch_json(node.url + "/debug/state")["requests"]["running"])
        os.kill(node.pid, number)
        asking.join()
        # What was in flight is answered first.
        assert len(asked[0]["choices"][0]["token_ids"]) == 60
        code, said = node.end()
        assert code == 0
        assert can_bind(node.port)
        assert "Traceback" not in said


def test_a_second_signal_ends_a_node_that_waits_for_a_lease():
    """The first one says what is awaited, and for how long: 30 s by default."""
    with Served("--kv-transfer-config", PRODUCER) as node:
        assert node.complete(max_tokens=1, kv_transfer_params={"do_remote_decode": True})[
            "kv_transfer_params"
        ]
        os.kill(node.pid, signal.SIGINT)
        time.sleep(1.0)
        assert node.process.poll() is None
        os.kill(node.pid, signal.SIGINT)
        code, said = node.end(10.0)
    assert code == 0
    assert "1 requests are held for peers, which may fetch them for 30 s more" in said
    assert "a second signal ends the node at once" in said


def test_a_wrong_configuration_is_one_line():
    with Served("--kv-transfer-config", "{", wait=False) as node:
        code, said = node.end(30)
        assert code == 2
        assert re.fullmatch(r"kvconnect: .*\n", said), said


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
    assert engine.snapshot.requests["waiting_for_kv"] == int(outstanding)
    engine.stop()
    assert used < 0.03
