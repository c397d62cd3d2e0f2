"""Nodes that pull what another has on disk alone: real workers and engines, a real folder, real sockets."""

from __future__ import annotations

import json
import os
import time

import pytest

from kvconnect.offload.disk.disk_tier import DiskTier
from kvconnect.offload.worker.tier_loop import TierLoop
from tests.node.node_harness import MODEL_NAMES, answer_of, make_prompt, until
from tests.node.test_pulls import assert_at_rest, closing, node, pulled
from tests.offload.node_kit import Keeper, disk_settings, make_keeper


def keeping(folder, share: float | None = 0.5, **options) -> Keeper:
    """A node that keeps what it computes on disk too."""
    offload = {"cpu_bytes": 64 << 20, **disk_settings(folder)}
    if share is not None:
        offload["peer_share"] = share
    extra = {"engine": "memory", "insecure": True, "slot_bytes": 64 << 10, "offload": offload}
    return make_keeper(json.dumps({"kv_role": "kv_both", "kv_connector_extra_config": extra}), **options)


def restarted(folder, *prompts: list[int], **options) -> Keeper:
    """A node that has these on disk alone: it was started anew."""
    first, measured = keeping(folder, **options), make_prompt(300, seed=100)
    for prompt in (*prompts, measured):
        first.ask(prompt)
    first.close()
    again = keeping(folder, **options)
    # It knows how fast its disk is.
    again.ask(measured)
    assert again.cached >= 256
    return again


def asking(source: Keeper, **options) -> Keeper:
    """A node that knows how fast it computes prompts, and what the link to its source takes."""
    target = node(source, learns=True, reserved_blocks=61, **options)
    target.ask(make_prompt(300, seed=101))
    links = target.engine.worker.transfer.decode.peers.links
    until(lambda: all(link.found for link in links.values()))
    assert pulled(target) == {"missed": 1, "tokens": 0}
    return target


def files(folder) -> list:
    """Those that were written first come first."""
    return sorted(folder.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def failures(client: Keeper) -> dict[str, int]:
    metrics = client.engine.worker.offload._metrics
    return {labels[0]: int(count) for labels, count in metrics.failures.values().items() if count}


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_prefix_that_is_on_the_peers_disk_alone_is_pulled(model, tmp_path):
    prompt = make_prompt(300, seed=1)
    source = restarted(tmp_path, prompt, model=model)
    target = asking(source, model=model)
    with closing(source, target):
        assert target.ask(prompt) == answer_of(prompt, model=model)
        assert target.cached >= 256
        assert pulled(target)["loaded"] == 1
        # Without a step of the source, which is idle.
        assert_at_rest(source, target)
        longer = [*prompt, *make_prompt(90, seed=2)]
        assert target.ask(longer) == answer_of(longer, model=model)


def remove(path):
    path.unlink()


def corrupt(path):
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("damage", [remove, corrupt])
def test_a_row_that_cannot_be_read_is_a_miss_and_the_prompt_is_computed(damage, tmp_path):
    prompt, other = make_prompt(300, seed=1), make_prompt(300, seed=2)
    source = restarted(tmp_path, prompt)
    target = asking(source)
    with closing(source, target):
        damage(files(tmp_path)[7])
        assert target.ask(prompt) == answer_of(prompt)
        assert target.cached == 0
        assert pulled(target) == {"missed": 1, "failed": 1, "tokens": 0}
        assert sum(failures(source).values()) == 1
        time.sleep(1.1)
        # What is left of it, up to the row that is gone, if that is the rest of a prefix.
        assert target.ask(prompt) == answer_of(prompt)
        source.ask(other)
        assert target.ask(other) == answer_of(other)
        assert target.cached == 288
        assert_at_rest(source, target)


def test_no_more_is_offered_than_there_are_rows_to_read_it_into(tmp_path):
    prompt = make_prompt(300, seed=1)
    first = restarted(tmp_path, prompt)
    row_bytes = first.engine.worker.offload.plan.classes[0].row_bytes
    first.close()
    source = restarted(tmp_path, share=(8 * row_bytes + 100) / (64 << 20))
    target, other = asking(source), asking(source)
    with closing(source, target, other):
        assert source.engine.worker.offload.plan.classes[0].num_lent == 8
        assert target.ask(prompt) == answer_of(prompt)
        assert target.cached == 128
        # What was read stays there until the rows are wanted for something else.
        assert other.ask(prompt) == answer_of(prompt)
        assert other.cached == 128
        assert not failures(source)
        assert_at_rest(source, target, other)


def test_with_a_share_of_none_nothing_comes_from_disk(tmp_path):
    prompt = make_prompt(300, seed=1)
    source = restarted(tmp_path, prompt, share=0.0)
    target = asking(source)
    with closing(source, target):
        target.ask(prompt)
        assert target.cached == 0
        assert pulled(target) == {"missed": 2, "tokens": 0}


@pytest.mark.parametrize("split", [96, 160])
def test_what_is_in_host_memory_is_not_read_again(split, tmp_path, monkeypatch):
    prompt = make_prompt(300, seed=1)
    source = restarted(tmp_path, prompt)
    target = asking(source)
    read, ask = [], TierLoop.ask
    monkeypatch.setattr(TierLoop, "ask", lambda *given: (read.append(len(given[2].hashes)), ask(*given)))
    with closing(source, target):
        source.ask(prompt[: split + 1])
        assert target.ask(prompt) == answer_of(prompt)
        assert target.cached == 288
        assert read == [split // 16, 18 - split // 16]
        assert_at_rest(source, target)


@pytest.fixture
def slow_disk(monkeypatch):
    read_row = DiskTier._read_row

    def read_slowly(*given):
        time.sleep(0.03)
        return read_row(*given)

    monkeypatch.setattr(DiskTier, "_read_row", read_slowly)


def test_what_a_slow_disk_has_is_computed(tmp_path, slow_disk):
    prompts = [make_prompt(300, seed=seed) for seed in range(1, 5)]
    source = restarted(tmp_path, *prompts)
    target = asking(source)
    with closing(source, target):
        for prompt in prompts[1:]:
            assert target.ask(prompt) == answer_of(prompt)
            assert target.cached == 0
        assert pulled(target) == {"missed": 1, "not_worth_it": 3, "tokens": 0}
        # Of what is in host memory in part, that part is loaded.
        source.ask(prompts[0][:257])
        assert target.ask(prompts[0][:290]) == answer_of(prompts[0][:290])
        assert target.cached == 256
        assert_at_rest(source, target)


def test_of_a_disk_that_was_never_read_a_little_is_read_first(tmp_path):
    prompt, other = make_prompt(300, seed=1), make_prompt(300, seed=2)
    restarted(tmp_path, prompt, other).close()
    source = keeping(tmp_path)
    target = asking(source)
    with closing(source, target):
        work = source.engine.worker.offload._loop
        assert not work.disk_bytes_per_s
        assert target.ask(prompt) == answer_of(prompt)
        assert target.cached == 0
        until(lambda: work.disk_bytes_per_s)
        assert target.ask(other) == answer_of(other)
        assert target.cached == 288
        assert_at_rest(source, target)
