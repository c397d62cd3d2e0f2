"""Hints and sessions as vLLM 0.33 has them on its requests, and as older ones pass them on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from vllm.v1.request import Request, RequestStatus

from kvconnect.cache.specs import KVCacheGroup
from kvconnect.config import OffloadConfig
from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.offload.scheduler.hit_requirements import HitRequirements
from kvconnect.offload.scheduler.host import KeptBlocks
from kvconnect.offload.scheduler.offload_scheduler import OffloadScheduler
from kvconnect.transfer.orders import OrdersDraft
from kvconnect.transfer.stack import Computed, Step
from tests.offload.half_kit import Kind
from tests.vllm_contract import test_scheduler_hooks as hooks_kit
from tests.vllm_contract.test_pulls import hashed
from tests.vllm_contract.test_pulls import seed as seed

try:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
except ImportError:
    # As vllm/v1/kv_hints/protocol.py of 0.33 has them.
    class KvHintAction(msgspec.Struct, frozen=True):  # type: ignore[no-redef]
        action_id: str
        action_type: str
        action_version: str
        payload: dict[str, Any]

    class KvHintsEnvelope(msgspec.Struct, frozen=True):  # type: ignore[no-redef]
        protocol_version: str
        message_id: str
        actions: list[KvHintAction]


PIN = KvHintsEnvelope("1", "m-1", [KvHintAction("a-1", "pin", "1", {"ttl_s": 60})])


def with_hints(name: str, salt: str | None = None) -> Request:
    """A request of 0.33 with a session and hints, on any vLLM."""
    request = hashed(name, 64, cache_salt=salt)
    request.session_id, request.kv_hints = "session", PIN
    return request


def plain(name: str, params: Any) -> Request:
    request = hashed(name, 64)
    request.kv_transfer_params = params
    return request


def finished(*requests: Request, rows: int = 16) -> list[dict[str, Any]]:
    """What comes of the hints of requests that a connector computes one after the other."""
    groups = [KVCacheGroup(("layer",), Kind(16).spec().spec)]
    requirements = HitRequirements.of(groups, [0], 16)
    kept = KeptBlocks(
        groups,
        requirements,
        hashes=lambda request, _: request.block_hashes,
        row_bytes={0: 64},
        clock=lambda: 1.0,
    )
    half = OffloadScheduler(OffloadConfig(cpu_bytes=64 * rows), kept, OrdersDraft([]))
    made, answers = hooks_kit.connector(SchedulerHalf(offload=half)), []
    made._workers = {0: hooks_kit.OWN}
    for number, request in enumerate(requests):
        blocks = [[1 + 4 * number + at for at in range(4)]]
        made.on_new_request(request)
        half.matched_tokens(request, 0)
        half.update_after_alloc(request, blocks, 0)
        half.launched(Step([Computed(request.request_id, 64, blocks)]))
        request.append_output_token_ids([7])
        request.status = RequestStatus.FINISHED_STOPPED
        kept, params = made.request_finished_all_groups(request, tuple(blocks))
        assert not kept
        answers.append(params["kv_hint_results"])
    assert not half.state()["offload_requests"]
    return answers


def test_hints_of_a_request_are_answered_with_its_parameters():
    (answer,) = finished(with_hints("one"))
    assert answer["message_id"] == "m-1"
    (done,) = answer["actions"]
    assert done == {
        "action_id": "a-1",
        "action_type": "pin",
        "outcome": "accepted",
        "tier": "host",
        "num_tokens": 64,
        "ttl_s": 60.0,
    }


def test_tenants_by_salt_have_quotas_of_their_own():
    answers = finished(with_hints("one", "a"), with_hints("two", "a"), with_hints("three", "b"), rows=20)
    first, again, other = (answer["actions"][0] for answer in answers)
    # The same prompt once more counts once; another salt makes other blocks, and another tenant.
    assert [first["outcome"], again["outcome"], other["outcome"]] == ["accepted"] * 3
    tight = finished(with_hints("one", "a"), with_hints("two", "b"), rows=8)
    assert [answer["actions"][0]["num_tokens"] for answer in tight] == [32, 32]


def test_older_releases_pass_the_same_on_in_the_parameters_of_a_request():
    given = {"kv_hints": msgspec.to_builtins(PIN), "session_id": "session"}
    assert finished(plain("one", given)) == finished(with_hints("one"))


@pytest.mark.parametrize(
    "given", [{"kv_hints": "pin"}, {"kv_hints": {"actions": 3}}, {"kv_hints": {chr(0xD800): 1}}]
)
def test_what_cannot_be_read_is_said_and_the_request_runs(given):
    (answer,) = finished(plain("one", given))
    assert "kv_hints cannot be used" in answer["error"]
    assert not answer["actions"]
