"""Notices on a node: a request that announces its prompt brings what is kept of it, and computes nothing."""

from __future__ import annotations

import pytest

from kvconnect.offload.scheduler import sessions
from tests.node.node_harness import make_prompt
from tests.offload.node_kit import disk_settings, expected
from tests.offload.test_node_sessions import FIRST, Talk, hints

PREFETCH = {"of": "prompt"}
DEVICE_POOL = 64


class Announced(Talk):
    """A node whose host memory has room for four turns."""

    def __init__(self, model: str, is_caching: bool = False, **offload) -> None:
        super().__init__(model, DEVICE_POOL if is_caching else 0, is_caching=is_caching, **offload)

    def find(self, prompt: list[int]) -> int:
        """Ask for an answer, which is right; how much of the prompt was not computed for it."""
        self.ask(prompt)
        return self.cached

    def announce(self, prompt: list[int], *more: tuple[str, dict], payload: dict | None = None) -> dict:
        """The result of a notice; checks that no more than a token or so was computed."""
        self.keeper.ask(prompt, 8, hints(("prefetch", {**PREFETCH, **(payload or {})}), *more))
        assert self.last.finish_reason == "length"
        return self.answers[0]


@pytest.mark.parametrize("model", ["sliding", "hybrid"])
def test_what_is_on_disk_is_in_host_memory_when_its_request_comes(model, tmp_path):
    node = Announced(model, **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    done = node.announce(FIRST, payload={"to": "host"})
    assert done["outcome"] == "accepted", done
    assert done["tier"] == "host"
    # Host memory has it, whatever becomes of the disk.
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    assert node.find(FIRST) == done["num_tokens"] > 0


def test_what_is_kept_is_in_the_devices_cache_when_its_request_comes(tmp_path):
    node = Announced("gqa", is_caching=True, **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    done = node.announce(FIRST)
    assert (done["outcome"], done["tier"]) == ("accepted", "device"), done
    half = node.keeper.engine.scheduler.hooks
    restores, restore = [], half.offload._lookup.restore
    half.offload._lookup.restore = lambda *given: (restores.append(given), restore(*given))
    assert node.find(FIRST) == done["num_tokens"] > 0
    assert not restores, "it was in the device's cache"


def test_what_is_not_there_is_answered_and_not_computed():
    node = Announced("gqa", is_caching=True)
    stranger = make_prompt(300, seed=77)
    done = node.announce(stranger)
    assert done["outcome"] == "rejected"
    assert "of 288 tokens 0 are kept" in done["reason"]
    # Nothing was computed that the prompt itself would find.
    assert node.find(stranger) == 0


def test_a_notice_is_kept_until_its_time_within_the_quota_and_dropped(tmp_path):
    node = Announced("gqa", **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    node.announce(FIRST, ("pin", {"ttl_s": 600}))
    brought, pinned = node.answers
    assert brought["outcome"] == pinned["outcome"] == "accepted", node.answers
    assert pinned["num_tokens"] == brought["num_tokens"] == 288
    node.press()
    for file in tmp_path.rglob("*.kv"):
        file.unlink()
    assert node.find(FIRST) == 288
    node.announce(make_prompt(20, seed=5), ("release", {}))
    assert node.answers[1]["outcome"] == "accepted"
    assert node.pinned == 0


def test_a_notice_beyond_the_quota_is_clipped(tmp_path):
    node = Announced("gqa", pin_quota=0.1, **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    done = node.announce(FIRST, payload={"to": "host"})
    assert done["outcome"] == "clipped", done
    assert 0 < done["num_tokens"] < 288
    assert "quota" in done["reason"]
    none = Announced("gqa", pin_quota=0.0)
    none.ask(FIRST)
    assert none.announce(FIRST)["outcome"] == "rejected"


def test_hundreds_at_once_are_answered_bounded_and_leave_nothing(tmp_path):
    node = Announced("gqa", **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    keeper, names = node.keeper, [f"n{number}" for number in range(4 * sessions.MOST_NOTICES)]
    half = keeper.engine.scheduler.hooks
    for number, name in enumerate(names):
        prompt = FIRST if number % 2 else make_prompt(300, seed=number)
        keeper.submit(name, prompt, 8, hints(("prefetch", PREFETCH)))
    most = 0
    while not all(keeper.last(name) for name in names):
        most = max(most, sum(notice.most_tokens for notice in half.notices.values()))
        keeper.step()
    keeper.settle()
    quota = half.offload.host.requirements.most_tokens(half.offload.host.pins.quota())
    assert 0 < most <= quota
    answers = [keeper.last(name).kv_transfer_params["kv_hint_results"]["actions"][0] for name in names]
    outcomes = [answer["outcome"] for answer in answers]
    assert "accepted" in outcomes
    assert outcomes.count("rejected") > len(names) / 2
    for reason in ("64 notices are being carried out", "bring"):
        assert any(reason in answer.get("reason", "") for answer in answers)
    assert not half.notices


def test_a_notice_that_is_wrong_is_rejected_and_computes_nothing():
    node = Announced("gqa", is_caching=True)
    for payload, text in (
        ({"to": "disk"}, "accepted: to host"),
        ({"to": "moon"}, "to"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"of": "prompt", "tokens": [1]}, "tokens"),
        # No names are taken from a client.
        ({"names": ["00"]}, "names"),
    ):
        done = node.announce(FIRST, payload=payload)
        assert done["outcome"] == "rejected", payload
        assert text in done["reason"], payload
    assert node.find(FIRST) == 0


@pytest.mark.parametrize("more", [{}, {"to": "moon"}])
def test_a_notice_is_for_one_node_and_not_for_a_pair(more):
    node = Announced("gqa")
    keeper = node.keeper
    tokens = keeper.ask(FIRST, 8, hints(("prefetch", {**PREFETCH, **more}), do_remote_prefill=True))
    (done,) = node.answers
    assert done["outcome"] == "rejected"
    assert more or "without do_remote" in done["reason"]
    # It is a request like others.
    assert tokens == expected(FIRST, 8)


def test_two_prefetches_of_a_prompt_are_one():
    node = Announced("gqa")
    node.ask(FIRST)
    node.announce(FIRST, ("prefetch", PREFETCH))
    assert [one["outcome"] for one in node.answers] == ["accepted", "rejected"]


def test_a_client_that_leaves_leaves_nothing(tmp_path):
    node = Announced("gqa", **disk_settings(tmp_path))
    node.ask(FIRST)
    node.press()
    for number in range(4):
        node.keeper.submit(f"gone{number}", FIRST, 8, hints(("prefetch", PREFETCH)))
        for _ in range(number):
            node.keeper.step()
        node.keeper.engine.abort(f"gone{number}")
        node.keeper.settle()
    half = node.keeper.engine.scheduler.hooks
    assert not half.notices
