"""A peer that is killed, absent or of another kind: who depended on it gets a reason, and others go on."""

from __future__ import annotations

import itertools
import json
import threading
import time

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from kvconnect.node.children import BadAnswer
from tests.ports import free_port
from tests.sglang.servers import (
    PREFILL_SIDE,
    Asked,
    decode_server,
    pair,
    prefill_server,
    random_prompt,
    running,
    settings,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.servers]

SOON_S = 9.0
"""A request has its error by then. On an idle machine it takes two; SGLang's own base takes 10 to 300."""
LEASE_S = 8.0
COMPUTED_S = 20.0
"""Two long prompts are computed by then, also on a machine that has other work."""
LONG, SHORT = 3000, 200


@pytest.fixture(scope="module")
def servers(model, tmp_path_factory):
    with pair(model, tmp_path_factory.mktemp("faults"), "nixl", lease_s=LEASE_S) as both:
        yield both


def seconds_to_reason(asked: Asked, at: int = 1) -> tuple[float, str]:
    began = time.monotonic()
    reason = asked.reason(at)
    return time.monotonic() - began, reason


def assert_alive(plain, prefill, decode, seed):
    prompt = random_prompt(SHORT, seed)
    assert Asked(prefill, decode, prompt).tokens() == plain(prompt)
    prefill.wait_idle()
    decode.wait_idle()


def test_a_room_in_use_is_refused_and_both_servers_live(plain, servers):
    prefill, decode = servers
    prompt, other = random_prompt(LONG, 1), random_prompt(SHORT, 2)
    with Asked(prefill, decode, prompt, room=77) as first:
        time.sleep(0.3)
        with Asked(prefill, decode, other, room=77) as second:
            answers = []
            for asked in (second, first):
                try:
                    answers.append(asked.answer()["output_ids"])
                except BadAnswer as error:
                    assert "77" in str(error)
                    answers.append(None)
    assert None in answers
    assert set(map(json.dumps, answers)) <= {json.dumps(one) for one in (None, plain(prompt), plain(other))}
    assert_alive(plain, prefill, decode, 3)


def test_requests_without_a_room_or_with_a_port_where_no_server_listens(plain, servers):
    prefill, decode = servers
    gaps: list[float] = []
    going_on = threading.Thread(target=lambda: gaps.extend(decode_gaps(prefill, decode, 400)))
    going_on.start()
    time.sleep(1.0)
    absent = {"bootstrap_port": free_port()}
    with Asked(prefill, decode, random_prompt(SHORT, 4), decode_only=absent) as asked:
        seconds, reason = seconds_to_reason(asked)
        assert str(absent["bootstrap_port"]) in reason
    with Asked(prefill, decode, random_prompt(SHORT, 5), decode_only={"bootstrap_port": None}) as asked:
        # D takes its own port instead, where there is no prefill server.
        without_port, _ = seconds_to_reason(asked)
    with Asked(prefill, decode, random_prompt(SHORT, 6), decode_only={"bootstrap_room": None}) as asked:
        assert "bootstrap" in asked.reason()
    going_on.join(60)
    print(f"absent P: {seconds:.2f} s, no port: {without_port:.2f} s, longest gap {max(gaps):.2f} s")
    assert seconds < SOON_S
    assert without_port < SOON_S
    # One request with a wrong address may not stop the decoding of others.
    assert max(gaps) < 1.5
    assert_alive(plain, prefill, decode, 7)


def decode_gaps(prefill, decode, tokens):
    """Seconds between the tokens of a streamed answer."""
    with Asked(prefill, decode, random_prompt(SHORT, 8), max_new_tokens=tokens, stream=True) as asked:
        moments = [time.monotonic() for _ in asked.lines()]
    return [late - early for early, late in itertools.pairwise(moments)]


def test_a_decode_server_that_is_killed(plain, servers):
    prefill, decode = servers
    asked = [Asked(prefill, decode, random_prompt(LONG, 10 + n)) for n in range(2)]
    time.sleep(1.5)
    decode.kill()
    began = time.monotonic()
    # The clients do not leave, and so it is P itself that misses D, once it has computed the prompts.
    prefill.wait_idle(LEASE_S + COMPUTED_S)
    print(f"D killed: P's pages are free after {time.monotonic() - began:.2f} s")
    for one in asked:
        one.leave()
    decode.start()
    decode.wait_ready()
    assert_alive(plain, prefill, decode, 20)


def test_a_prefill_server_that_is_killed(plain, servers):
    prefill, decode = servers
    going_on = random_prompt(SHORT, 30)
    expected = plain(going_on, max_new_tokens=300)
    decoding = Asked(prefill, decode, going_on, max_new_tokens=300)
    decoding.answer(PREFILL_SIDE)
    asked = [Asked(prefill, decode, random_prompt(LONG, 31 + n)) for n in range(4)]
    time.sleep(1.0)
    prefill.kill()
    killed = time.monotonic()
    reasons = [one.reason() for one in asked]
    seconds = time.monotonic() - killed
    print(f"P killed: {len(reasons)} requests failed within {seconds:.2f} s")
    assert decoding.answer()["output_ids"] == expected
    assert seconds < SOON_S
    for reason in reasons:
        assert "127.0.0.1" in reason
    decode.wait_idle()
    prefill.start()
    prefill.wait_ready()
    assert_alive(plain, prefill, decode, 40)


def test_peers_that_cannot_work_together(plain, servers, model, tmp_path):
    """Each is refused by name, and the prefill server lives on."""
    prefill, _ = servers
    (tmp_path / "key").write_text("another key, of 32 bytes at least, of another cluster\n")
    (tmp_path / "key").chmod(0o600)
    others = {
        "wrong-key": (settings("nixl", key_file=str(tmp_path / "key")), ()),
        "page-size": (settings("nixl"), ("--page-size", "32")),
    }
    for name, (environment, options) in others.items():
        server = decode_server(model, tmp_path, "kvconnect", name, options=options, environment=environment)
        with running(server), Asked(prefill, server, random_prompt(SHORT, 50)) as asked:
            seconds, reason = seconds_to_reason(asked)
            print(f"{name}: {seconds:.2f} s: {reason[:300]}")
            assert seconds < SOON_S
            assert {"wrong-key": "key", "page-size": "page"}[name] in reason
            server.wait_idle()
            assert server.exit_code() is None
        prefill.wait_idle(LEASE_S + SOON_S)


def test_a_prefill_server_of_another_backend(plain, servers, model, tmp_path):
    _, decode = servers
    other = prefill_server(model, tmp_path, "mooncake", environment={"MC_FORCE_TCP": "1"})
    with running(other), Asked(other, decode, random_prompt(SHORT, 60)) as asked:
        seconds, reason = seconds_to_reason(asked)
        print(f"other backend: {seconds:.2f} s: {reason[:300]}")
        assert "kvconnect" in reason
    decode.wait_idle()
