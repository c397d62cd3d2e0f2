"""The connector's contract: loads, their failures and aborts, and blocks that wait to be fetched."""

import pytest

from tests.node.node_harness import MODEL_NAMES, CopyConnector, make_client, make_prompt

REMOTE_DECODE = {"do_remote_decode": True}


def make_pair(name, prompt, *, prefill_options=None, **options):
    """A prefilled prompt on P, and D, whose loads copy P's pages. Returns both connectors and parameters."""
    prefill = CopyConnector()
    p = prefill.attach(model=name, **(prefill_options or {}))
    p.submit("p", prompt, 1, REMOTE_DECODE)
    p.run("p")
    params = p.last("p").kv_transfer_params
    decode = CopyConnector(p)
    decode.attach(model=name, reserved_blocks=11, **options)
    return prefill, decode, params


@pytest.mark.parametrize("name", MODEL_NAMES)
@pytest.mark.parametrize("length", [1, 2, 128, 129, 300])
def test_a_loaded_request_gives_the_tokens_of_a_local_one(name, length):
    prompt = make_prompt(length, seed=length)
    expected = make_client(model=name).complete(prompt)
    prefill, decode, params = make_pair(name, prompt, prefill_options={"max_num_batched_tokens": 100})
    p, d = prefill.client, decode.client
    assert (p.held > 0) == (length > 1 or name != "hybrid")
    assert d.complete(prompt, 8, params) == expected
    p.steps(1)
    assert p.held == (0 if length > 1 or name != "hybrid" else p.held)
    assert d.held == 0
    if length > 1 or name != "hybrid":
        assert decode.calls[1] == ("alloc", "request-0", length - (name == "hybrid"))
        assert d.last("request-0").cached_tokens == length - 1


@pytest.mark.parametrize("name", ["gqa", "sliding", "hybrid"])
def test_a_load_is_needed_for_the_right_tokens(name):
    """The check above would be empty if the loaded bytes did not matter."""
    prompt = make_prompt(100)
    _, decode, params = make_pair(name, prompt)
    decode._copy = lambda _: None
    assert decode.client.complete(prompt, 8, params) != make_client(model=name).complete(prompt)


def test_a_local_prefix_is_not_loaded():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt)
    d = decode.client
    expected = d.complete(prompt)
    assert d.complete(prompt, 8, params) == expected
    assert ("matched", "request-1", 96) in decode.calls
    assert ("alloc", "request-1", 4) in decode.calls


def test_blocks_wait_until_they_were_sent():
    prompt = make_prompt(100)
    prefill, _, params = make_pair("gqa", prompt)
    p = prefill.client
    p.steps(5)
    assert p.held == 7
    assert p.engine.snapshot.requests["waiting_to_be_fetched"] == 1
    assert params["blocks"] == p.last("p").kv_block_ids
    prefill.sent.append("p")
    p.steps(1)
    assert p.held == 0
    prefill.sent.append("p")
    p.steps(1)


def test_others_run_while_a_request_loads_and_its_blocks_are_not_reused_as_prefix():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt)
    decode.hold_loads = True
    d = decode.client
    d.submit("loading", prompt, 8, params)
    d.steps(2)
    assert d.engine.snapshot.requests["waiting_for_kv"] == 1
    assert d.complete(prompt) == make_client().complete(prompt)
    assert d.last("request-1").cached_tokens == 0
    decode.release()
    d.run("loading")
    assert d.tokens("loading") == make_client().complete(prompt)


def test_an_abort_while_loading_keeps_the_blocks_until_they_are_quiet():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt)
    decode.hold_loads = True
    d = decode.client
    d.submit("loading", prompt, 8, params)
    d.steps(2)
    d.engine.abort("loading")
    d.steps(3)
    assert decode.finished_calls("loading") == [False]
    assert d.last("loading").finish_reason == "abort"
    assert d.held == 7
    assert d.engine.snapshot.requests["aborted_while_loading"] == 1
    decode.fail_with = "cancelled"
    decode.release()
    d.steps(1)
    assert d.held == 0
    assert decode.finished_calls("loading") == [False]


def test_a_failed_load_is_computed_here():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt)
    decode.fail_with = "the peer left"
    d = decode.client
    assert d.complete(prompt, 8, params) == make_client().complete(prompt)
    assert d.last("request-0").cached_tokens == 0
    assert d.held == 0
    assert [call[0] for call in decode.calls].count("matched") == 2
    assert decode.finished_calls("request-0") == [True]


def test_a_failed_load_ends_the_request_if_so_configured():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt, recompute=False)
    decode.fail_with = "the peer left"
    d = decode.client
    d.submit("r", prompt, 8, params)
    d.run("r")
    failure = d.last("r").failure
    assert (failure.status, failure.message) == (502, "the peer left")
    assert d.held == 0
    assert decode.finished_calls("r") == [False]


def test_the_connector_may_ask_to_be_asked_again():
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt)
    decode.defer = 3
    d = decode.client
    d.submit("r", prompt, 8, params)
    d.submit("other", make_prompt(5), 8)
    wait_s = d.engine.run_once()
    assert wait_s == 0.0  # the other one runs
    d.run("r", "other")
    assert d.tokens("r") == make_client().complete(prompt)
    assert [call[0] for call in decode.calls if "r" in call].count("matched") == 4


def test_refused_parameters_end_the_request():
    connector = CopyConnector()
    client = connector.attach()
    client.submit("r", make_prompt(5), 8, {"bad": 1})
    client.run("r")
    assert client.last("r").failure.status == 400
    assert connector.finished_calls("r") == [False]


def test_loaded_requests_overtake_one_that_waits_for_blocks():
    """Without it, the request at the head and the loaded one behind it would wait for each other."""
    prompt = make_prompt(100)
    _, decode, params = make_pair("gqa", prompt, num_blocks=11 + 1 + 18, max_num_seqs=1)
    decode.hold_loads = True
    d = decode.client
    d.submit("loading", prompt, 8, params)
    d.steps(1)
    # Starts with 8 of the remaining 11 blocks, and runs out of them while the loaded one waits for a row.
    d.submit("long", make_prompt(120, seed=1), 100)
    d.steps(3)
    decode.release()
    d.run("loading", "long")
    assert d.requests["long"].preemptions > 0
    assert d.tokens("long") == make_client().complete(make_prompt(120, seed=1), 100)
    assert d.tokens("loading") == make_client().complete(prompt)
    assert d.held == 0


@pytest.mark.parametrize("name", ["gqa", "hybrid", "sliding"])
def test_a_preempted_loaded_request_is_computed_here(name):
    prompt = make_prompt(100)
    needed = {"gqa": 20, "hybrid": 16, "sliding": 50}[name]
    _, decode, params = make_pair(name, prompt, num_blocks=12 + needed)
    d = decode.client
    d.submit("first", make_prompt(120, seed=1), 90)
    d.steps(1)
    d.submit("r", prompt, 90, params)
    d.run("first", "r")
    assert d.requests["r"].preemptions > 0
    assert d.tokens("r") == make_client(model=name).complete(prompt, 90)


def test_every_request_is_finished_exactly_once():
    connector = CopyConnector()
    client = connector.attach(num_blocks=30)
    for index in range(12):
        client.submit(str(index), make_prompt(30 + index, seed=index), 20)
    client.steps(4)
    for index in (0, 5, 11):
        client.engine.abort(str(index))
    client.run(*map(str, range(12)))
    for index in range(12):
        assert connector.finished_calls(str(index)) == [index not in (0, 5, 11)]


def test_results_that_nothing_awaits_are_logged_once(caplog):
    connector = CopyConnector()
    client = connector.attach()
    for _ in range(2):
        connector.sent.append("stranger")
        client.steps(1)
    assert caplog.text.count("that nothing is awaited for: ['stranger']") == 1
