"""A node's two processes: what becomes of one when the other dies, and of both when they are told to end."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from kvconnect.demo.faults.listeners import listeners
from kvconnect.demo.http import BadAnswer, fetch, fetch_json, read_metrics
from kvconnect.node.connector import Connector
from kvconnect.node.options import NodeOptions
from kvconnect.node.serve import build_engine
from tests.node.node_harness import CopyConnector, make_client, make_prompt

PROMPT = make_prompt(50)
SERVE = "import sys; from kvconnect.cli import main; sys.argv[1:1] = ['serve', '--num-threads', '1']; main()"


class Served:
    """``kvconnect serve`` in a process group of its own, and the front that it started."""

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
            self.front = self.find_front()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def find_front(self):
        (front,) = children_of(self.pid)
        return front

    def next_front(self, before, timeout_s=10.0):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = children_of(self.pid) - {before}
            if found:
                return found.pop()
            time.sleep(0.01)
        raise AssertionError("no front was started")

    def complete(self, timeout_s=20.0, **body):
        return fetch_json(self.url + "/v1/completions", {"prompt": PROMPT, **body}, timeout_s)

    def end(self, timeout_s=15.0):
        """Its exit code and what it said."""
        code = self.process.wait(timeout_s)
        return code, self.process.stderr.read()


def children_of(pid):
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                found.add(int(path.parent.name))
    return found


def until(true, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.01)
    return False


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def can_bind(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture(scope="module")
def node():
    """One that nobody ends."""
    with Served() as served:
        yield served


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to_both", [False, True])
def test_the_served_node_ends_on_a_signal_and_leaves_nothing(number, to_both):
    with Served() as node:
        asked = []
        asking = threading.Thread(target=lambda: asked.append(node.complete(max_tokens=60)))
        asking.start()
        until(lambda: fetch_json(node.url + "/debug/state")["requests"]["running"])
        (os.killpg if to_both else os.kill)(node.pid, number)
        asking.join()
        # What was in flight is answered first.
        assert len(asked[0]["choices"][0]["token_ids"]) == 60
        code, said = node.end()
        assert code == 0
        assert is_gone(node.front)
        assert can_bind(node.port)
        assert "Traceback" not in said
        assert "ended with code" not in said


def test_a_wrong_configuration_is_one_line_of_one_process():
    with Served("--kv-transfer-config", "{", wait=False) as node:
        code, said = node.end(30)
        assert code == 2
        assert re.fullmatch(r"kvconnect: .*\n", said), said


@pytest.mark.parametrize("front_is", ["running", "stopped"])
def test_the_front_dies_with_the_engine(front_is):
    with Served() as node:
        if front_is == "stopped":
            os.kill(node.front, signal.SIGSTOP)
        os.kill(node.pid, signal.SIGKILL)
        assert until(lambda: is_gone(node.front), 2.0)
        assert until(lambda: can_bind(node.port), 2.0)


def test_a_front_that_dies_is_started_again_and_its_requests_end():
    with Served() as node:
        expected = node.complete()["choices"][0]["token_ids"]
        body = json.dumps({"prompt": [1], "max_tokens": 3000, "stream": True}).encode()
        with urllib.request.urlopen(node.url + "/v1/completions", body) as stream:
            stream.readline()
            os.kill(node.front, signal.SIGKILL)
            # Whoever comes now waits at the same address.
            assert node.complete()["choices"][0]["token_ids"] == expected
        assert node.next_front(node.front) != node.front
        state = fetch_json(node.url + "/debug/state")
        assert state["counts"]["aborted"] == 1
        assert state["blocks"]["held"] == 0
        assert read_metrics(node.url)["kvconnect_node_front_restarts_total", (("model", "mla"),)] == 1
        os.kill(node.pid, signal.SIGTERM)
        code, said = node.end()
        assert code == 0
        assert said.count("ended with code -9 and is started again") == 1


def test_a_front_that_dies_again_and_again_ends_the_node():
    with Served() as node:
        front = 0
        for _ in range(4):
            front = node.next_front(front)
            fetch(node.url + "/health")
            os.kill(front, signal.SIGKILL)
            assert until(lambda front=front: is_gone(front))
        code, said = node.end()
        assert code == 2
        assert said.endswith(
            "kvconnect: the node's HTTP front died again and again, see the log; the node has ended\n"
        )
        assert can_bind(node.port)


def test_a_stopped_engine_answers_nobody_and_goes_on(node):
    expected = node.complete()["choices"][0]["token_ids"]
    os.kill(node.pid, signal.SIGSTOP)
    with pytest.raises(BadAnswer, match="no answer"):
        fetch(node.url + "/health", timeout_s=0.5)
    asked = []
    asking = threading.Thread(target=lambda: asked.append(node.complete()))
    asking.start()
    time.sleep(0.2)
    assert asked == []
    os.kill(node.pid, signal.SIGCONT)
    asking.join()
    assert asked[0]["choices"][0]["token_ids"] == expected
    assert fetch(node.url + "/health")


def test_the_link_is_no_port_and_no_file(node):
    assert set(listeners(node.pid)) == {("127.0.0.1", node.port)}
    assert set(listeners(node.front)) == {("127.0.0.1", node.port)}
    inodes = set()
    for pid in (node.pid, node.front):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(path)))
    local = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    ours = [fields for fields in local if fields[6] in inodes]
    assert ours
    # A name would follow the inode.
    assert [fields[7:] for fields in ours] == [[]] * len(ours)


def test_the_front_loads_no_tensors():
    code = (
        "import sys; import kvconnect.node.front.process; "
        "print([name for name in ('torch', 'numpy', 'triton', 'zmq') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


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
