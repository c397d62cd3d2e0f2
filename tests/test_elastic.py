"""Nodes that come, go and change their role under load, behind a router that runs on: no request fails."""

from __future__ import annotations

import itertools
import json
import threading
import urllib.request

from kvconnect.node.children import Children
from tests.pair_kit import grown, route, serve, tokens, until
from tests.ports import free_port

PROMPTS = [list(range(1 + 3 * number, 150 + 20 * number)) for number in range(8)]
CLIENTS = 3


class Load:
    """Clients that ask without a pause, one after the other each. ``wrong`` has what was not as expected."""

    def __init__(self, url, expected):
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self.answered, self.wrong = 0, []
        self._threads = [threading.Thread(target=self._ask, args=(start,)) for start in range(CLIENTS)]

    def _ask(self, start):
        for number in itertools.count(start):
            if self._stop.is_set():
                return
            at = number % len(PROMPTS)
            try:
                got = tokens(self._url, PROMPTS[at])
            except Exception as error:
                self.wrong.append(str(error))
                continue
            self.answered += 1
            if got != self._expected[at]:
                self.wrong.append(f"prompt {at}: {got}")

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def goes_on(self, requests=3 * CLIENTS):
        """Wait for so many answers more: all that began before have ended."""
        wanted = self.answered + requests
        until(lambda: self.wrong or self.answered >= wanted, 60, every_s=0.01)
        assert not self.wrong


def test_nodes_are_added_drained_and_given_the_other_role_under_load(tmp_path):
    admin = free_port()

    def nodes(method="GET", **named):
        data = json.dumps(named).encode() if named else None
        request = urllib.request.Request(f"http://127.0.0.1:{admin}/nodes", data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return {(node["role"], node["url"]): node for node in json.load(answer)}

    def gone(role, url):
        """A node is drained of its requests: then it may end."""
        nodes("DELETE", role=role, url=url)
        until(lambda: (role, url) not in nodes(), 30)

    with Children(tmp_path) as children:
        made = {name: serve(children, name, "kv_both", protocol="auto", drain_s=20) for name in "abcde"}
        url = {name: child.wait_ready() for name, child in made.items()}
        expected = [tokens(url["a"], prompt) for prompt in PROMPTS]
        router = route(children, [url["a"], url["b"]], [url["c"]], "--admin", f"127.0.0.1:{admin}")
        with Load(router, expected) as load:
            load.goes_on()
            # From P to D, without a restart of anything.
            nodes("POST", role="decode", url=url["b"])
            gone("prefill", url["b"])
            load.goes_on()
            # D ends, its place taken by one that nobody knew.
            nodes("POST", role="decode", url=url["d"])
            gone("decode", url["c"])
            made["c"].ask_to_end()
            load.goes_on()
            # Likewise P, which ends once what it holds was fetched.
            nodes("POST", role="prefill", url=url["e"])
            gone("prefill", url["a"])
            made["a"].ask_to_end()
            load.goes_on()
            # From D to P.
            nodes("POST", role="prefill", url=url["d"])
            gone("decode", url["d"])
            load.goes_on()
        assert not load.wrong
        assert set(nodes()) == {("prefill", url["e"]), ("prefill", url["d"]), ("decode", url["b"])}
        for name, way in (("b", "received"), ("d", "received"), ("d", "sent"), ("e", "sent")):
            moved = grown(url[name], {}, "transfers_total", direction=way, outcome="ok")
            assert moved > 0, f"{name} has {way} nothing"
