"""Batching, preemption, aborts and refusals: none of them changes a token or loses a block."""

import pytest

from kvconnect.errors import LocalError
from tests.node.node_harness import MODEL_NAMES, make_client, make_prompt


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_tokens_do_not_depend_on_concurrency_or_preemption(name):
    prompts = [make_prompt(length, seed=length) for length in (100, 170, 7, 120, 64)]
    alone = [make_client(model=name).complete(prompt, 60) for prompt in prompts]
    # Few blocks: the requests cannot all run to their end at once.
    num_blocks = {"mixed": 6, "sliding": 42, "hybrid": 24}.get(name, 24)
    client = make_client(
        model=name, num_blocks=num_blocks, reserved_blocks=1, max_num_batched_tokens=48, max_model_len=256
    )
    for index, prompt in enumerate(prompts):
        client.submit(str(index), prompt, 60)
    client.run(*map(str, range(5)))
    assert [client.tokens(str(i)) + client.drafts(str(i)) for i in range(5)] == alone
    assert client.engine.scheduler.counts.preemptions > 0
    assert client.held == 0


def test_requests_share_steps():
    client = make_client()
    for index in range(4):
        client.submit(str(index), make_prompt(20, seed=index), 10)
    client.run("0", "1", "2", "3")
    assert client.engine.snapshot.steps <= 11


def test_no_more_than_max_num_seqs_run_at_once():
    client = make_client(max_num_seqs=2)
    for index in range(5):
        client.submit(str(index), make_prompt(20, seed=index), 4)
    most = 0
    for _ in range(40):
        client.steps(1)
        most = max(most, len(client.engine.scheduler.running))
    assert most == 2
    assert all(client.last(str(index)) for index in range(5))


def test_a_step_computes_no_more_than_its_budget():
    client = make_client(max_num_batched_tokens=32)
    for index in range(3):
        client.submit(str(index), make_prompt(50, seed=index), 4)
    engine = client.engine
    execute, sizes = engine.runner.execute, []
    engine.runner.execute = lambda step: (
        sizes.append(sum(len(c.token_ids) for c in step.chunks)) or execute(step)
    )
    client.run("0", "1", "2")
    assert max(sizes) == 32


def test_abort_frees_blocks_at_every_stage():
    client = make_client(num_blocks=24, max_num_batched_tokens=32)
    client.submit("running", make_prompt(100), 50)
    client.submit("waiting", make_prompt(300), 50)
    client.steps(2)
    client.submit("new", make_prompt(10), 5)
    for name in ("waiting", "running", "new", "running", "unknown"):
        client.engine.abort(name)
    client.steps(1)
    assert client.held == 0
    assert client.last("running").finish_reason == "abort"
    assert client.last("waiting").finish_reason == "abort"
    assert client.engine.snapshot.counts["aborted"] == 3
    assert client.complete(make_prompt(100)) == make_client().complete(make_prompt(100))


def test_a_prompt_starts_only_when_all_of_it_has_room():
    client = make_client(num_blocks=21, max_num_batched_tokens=32)
    client.submit("first", make_prompt(150), 30)
    client.steps(1)
    client.submit("second", make_prompt(200, seed=1), 2)
    client.run("first", "second")
    assert client.engine.snapshot.counts["preemptions"] == 0


def test_ids_are_unique():
    client = make_client()
    client.submit("same", make_prompt(5), 50)
    client.steps(1)
    client.submit("same", make_prompt(5), 50)
    with pytest.raises(LocalError, match="'same' is already in use"):
        client.steps(1)


def test_what_can_never_fit_is_refused_with_numbers():
    engine = make_client(num_blocks=11, max_model_len=300).engine
    assert engine.refusal(100, 61) is None
    assert "needs 11 cache blocks, the node has 10" in engine.refusal(100, 62)
    assert "is 301 tokens, max_model_len is 300" in engine.refusal(300, 1)


@pytest.mark.parametrize("name", ["gqa", "sliding", "hybrid", "mixed"])
def test_the_largest_request_that_is_accepted_also_ends(name):
    client = make_client(model=name, num_blocks=40, max_model_len=1000, max_num_batched_tokens=40)
    prompt_length = max(n for n in range(1, 990) if client.engine.refusal(n, 10) is None)
    assert len(client.complete(make_prompt(prompt_length), 10)) in (10, 20)


def test_a_long_window_prompt_fits_a_cache_smaller_than_all_its_blocks():
    # 3 groups of 38 blocks are 114; the windowed groups never hold more than a part of theirs.
    client = make_client(model="sliding", num_blocks=70, max_num_batched_tokens=64)
    assert client.engine.refusal(600, 8) is None
    assert client.complete(make_prompt(600)) == make_client(model="sliding").complete(make_prompt(600))
