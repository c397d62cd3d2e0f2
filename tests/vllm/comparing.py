"""Landed bytes against held bytes, as the observing connector wrote them down on both sides."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from tests.vllm.servers import Server
from tests.vllm.tiny_models import STATE_TAPS, STATE_WIDTH

Pages = dict[tuple[str, str, int], str]
"""A digest by layer, position of the block in the sequence, and head of the model."""


def assert_bytes_landed(prefill: Server, decode: Server, at_least: int) -> set[str]:
    """Every page that a rank of the decode server loaded equals that rank's of the prefill server.

    Returns the layers that were compared.
    """
    held = {(record["handle"], record["rank"]): record for record in prefill.observed("hold")}
    loads = decode.observed("load")
    assert len(loads) >= at_least
    compared = set()
    for load in loads:
        hold = held[load["handle"], load["rank"]]
        assert load["pages"].keys() == hold["pages"].keys()
        _assert_equal(_pages([load]), _pages([hold]))
        compared |= load["pages"].keys()
    same_ids = sum(held[load["handle"], load["rank"]]["ids"] == load["ids"] for load in loads)
    # Equal ids on both sides would hide a mix-up. By chance some may be, but not many.
    assert same_ids <= len(loads) // 4
    return compared


def assert_heads_landed(prefill: Server, decode: Server, at_least: int) -> None:
    """The same where the two sides divide the heads over different numbers of ranks, each evenly."""
    holds, loads = prefill.observed("hold"), decode.observed("load")
    handles = {record["handle"] for record in loads}
    assert len(handles) >= at_least
    for handle in handles:
        landed = _pages([record for record in loads if record["handle"] == handle])
        held = _pages([record for record in holds if record["handle"] == handle])
        assert landed.keys() <= held.keys()
        assert {head for *_, head in landed} == {head for *_, head in held}
        _assert_equal(landed, held)


def assert_states_landed(prefill: Server, decode: Server, at_least: int, heads: dict[str, int]) -> None:
    """Of a gated delta net the ranks of both sides hold the same, put together by hand.

    ``heads`` are those of the whole model by projection, in the order of the convolution's channels; they and
    the channels of each are what the tests' models have.
    """
    holds, loads = prefill.observed("hold"), decode.observed("load")
    handles = {record["handle"] for record in loads}
    assert len(handles) >= at_least
    for handle in handles:
        landed, held = (
            [
                record["states"]
                for record in sorted(records, key=lambda one: one["rank"])
                if record["handle"] == handle
            ]
            for records in (loads, holds)
        )
        assert landed[0], "no state was written down"
        for layer in landed[0]:
            pages = [[bytes.fromhex(states[layer]) for states in side] for side in (landed, held)]
            ours, theirs = (_whole_state(side, heads) for side in pages)
            for name, values in ours.items():
                assert values.any(), f"{name} of {layer} is all zeros"
                assert np.array_equal(values, theirs[name]), f"{name} of {layer} differs"


def _whole_state(pages: list[bytes], heads: dict[str, int]) -> dict[str, Any]:
    """The states of all heads, from the pages of all ranks."""
    parts: dict[str, list[Any]] = defaultdict(list)
    for page in pages:
        channels = {name: count * STATE_WIDTH // len(pages) for name, count in heads.items()}
        width = sum(channels.values())
        conv = np.frombuffer(page[: STATE_TAPS * width * 2], dtype=np.int16).reshape(STATE_TAPS, width)
        for name, part in zip(
            channels, np.split(conv, np.cumsum([*channels.values()])[:-1], axis=1), strict=True
        ):
            parts[name].append(part)
        rest = np.frombuffer(page[conv.nbytes :], dtype=np.uint8)
        parts["temporal"].append(rest.reshape(heads["v"] // len(pages), -1))
    return {name: np.concatenate(found, axis=0 if name == "temporal" else 1) for name, found in parts.items()}


def became_of(decode: Server, handle: str) -> str:
    """What the decode server's first rank wrote down of the load of a handle: ``load`` or ``failed``."""
    records = [*decode.observed("load"), *decode.observed("failed")]
    found = [record["kind"] for record in records if (record["handle"], record["rank"]) == (handle, 0)]
    assert len(found) == 1, f"{len(found)} loads of one handle were reported, {found}"
    return str(found[0])


def assert_nothing_landed(prefill: Server, decode: Server, handle: str) -> None:
    """No page of a load that failed is as the prefill server's: an answer of these pages is another one."""
    (held,) = [record for record in prefill.observed("hold") if record["handle"] == handle]
    (failed,) = [record for record in decode.observed("failed") if record["handle"] == handle]
    found, right = _pages([failed]), _pages([held])
    assert found.keys() == right.keys()
    assert not [key for key, digest in found.items() if right[key] == digest]


def _pages(records: list[dict[str, Any]]) -> Pages:
    found: Pages = {}
    for record in records:
        for layer, pages in record["pages"].items():
            for position, digests in pages.items():
                first = record["tensor_rank"] * len(digests)
                for head, digest in enumerate(digests, first):
                    found[layer, position, head] = digest
    return found


def _assert_equal(landed: Pages, held: Pages) -> None:
    differing = [key for key, digest in landed.items() if held[key] != digest]
    assert not differing, f"{len(differing)} of {len(landed)} pages differ, the first is {differing[0]}"
