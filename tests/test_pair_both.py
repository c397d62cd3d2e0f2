"""Two nodes that prefill for each other, as processes: each is asked for KV, and fetches some."""

from __future__ import annotations

import time

import pytest

from kvconnect.node.children import Children, growth, read_metrics
from kvconnect.node.demo import ask
from tests.test_pair import ASK_FOR_KV, node_options


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with Children(tmp_path_factory.mktemp("both")) as children:
        made = [
            children.start("first", *node_options("first", "kv_both")),
            children.start("second", *node_options("second", "kv_both"), "--reserved-blocks", "61"),
            children.start("alone", "serve", "--model", "gqa", "--port", "0"),
        ]
        yield [child.wait_ready() for child in made]


def prompt_of(length, first):
    return [1 + (first + 7 * index) % 200 for index in range(length)]


def test_a_node_that_is_chosen_for_both_legs_answers_and_holds_nothing(nodes):
    first, _, alone = nodes
    prompt = prompt_of(300, 500)
    answer = ask(first, "gqa", prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
    told = ask(first, "gqa", prompt, kv_transfer_params=answer["kv_transfer_params"])
    assert told["choices"][0]["token_ids"] == ask(alone, "gqa", prompt)["choices"][0]["token_ids"]
    deadline = time.monotonic() + 5
    while growth({}, read_metrics(first), "kvconnect_leases_held"):
        assert time.monotonic() < deadline, "it lets go of what it holds for itself"
        time.sleep(0.05)


def test_each_of_two_nodes_prefills_for_the_other(nodes):
    first, second, alone = nodes
    for number, (source, target) in enumerate(((first, second), (second, first), (first, second))):
        prompt = prompt_of(300, 31 * number)
        before = read_metrics(target)
        answer = ask(source, "gqa", prompt, max_tokens=1, kv_transfer_params=ASK_FOR_KV)
        told = ask(target, "gqa", prompt, kv_transfer_params=answer["kv_transfer_params"])
        assert told["choices"][0]["token_ids"] == ask(alone, "gqa", prompt)["choices"][0]["token_ids"]
        received = growth(
            before, read_metrics(target), "kvconnect_transfer_bytes_total", direction="received"
        )
        assert received > 0
