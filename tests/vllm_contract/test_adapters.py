"""A LoRA adapter is told by its contents. Runs without vLLM."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from kvconnect.vllm.adapters import Adapters, named_with
from kvconnect.vllm.offload import BlockHashes


def adapter(folder, content=b"w", alpha=8, number=1, **more):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text(f'{{"lora_alpha": {alpha}}}')
    return SimpleNamespace(lora_name="a", lora_int_id=number, lora_path=str(folder), **more)


def test_the_same_contents_are_one_adapter_wherever_they_lie(tmp_path):
    first = Adapters().digest(adapter(tmp_path / "a"))
    assert Adapters().digest(adapter(tmp_path / "b" / "c", number=9)) == first
    (tmp_path / "a" / "README.md").write_text("more")
    assert Adapters().digest(adapter(tmp_path / "a")) == first


@pytest.mark.parametrize("change", [{"content": b"v"}, {"alpha": 16}])
def test_other_weights_or_another_scale_under_one_name_and_path_are_another(tmp_path, change):
    first = Adapters().digest(adapter(tmp_path / "a"))
    assert Adapters().digest(adapter(tmp_path / "a", **change)) != first


def test_what_changes_under_a_loaded_adapter_is_exchanged_with_nobody(tmp_path):
    adapters, lora = Adapters(), adapter(tmp_path / "a")
    first = adapters.digest(lora)
    assert adapters.digest(lora) == first
    adapter(tmp_path / "a", b"other")
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(1, 1))
    changed = adapters.digest(lora)
    assert changed not in (first, Adapters().digest(lora))
    assert adapters.digest(lora) == changed
    inplace = adapter(tmp_path / "b", load_inplace=True, number=2)
    adapters.digest(inplace)
    adapter(tmp_path / "b", b"other")
    os.utime(tmp_path / "b" / "adapter_model.safetensors", ns=(1, 1))
    assert adapters.digest(inplace) == Adapters().digest(inplace), "it was loaded anew"


def test_an_adapter_that_is_not_here_is_one_of_its_own():
    lora = SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="/not/there")
    adapters = Adapters()
    assert adapters.digest(lora) == adapters.digest(lora) != Adapters().digest(lora)


class View:
    def __init__(self, lora=None):
        self.block_hashes = [bytes([number]) * 32 for number in range(6)]
        self.lora_request = lora


def test_blocks_have_another_name_with_each_adapter_and_their_own_without(tmp_path):
    hashes = BlockHashes(16, Adapters())
    plain = View()
    assert hashes(plain, 16) is plain.block_hashes
    one, same, other = (
        View(adapter(tmp_path / name, content, number=number))
        for number, (name, content) in enumerate([("a", b"1"), ("b", b"1"), ("c", b"2")], 1)
    )
    first = list(hashes(one, 16))
    assert first == list(hashes(same, 16)) != list(hashes(other, 16))
    assert not set(first) & set(plain.block_hashes)
    assert list(hashes(one, 32)) == first[1::2]
    one.block_hashes.append(b"z" * 32)
    assert list(hashes(one, 16))[:6] == first
    assert len(hashes(one, 16)) == 7
    assert named_with(named_with(b"abcdef", b"xy"), b"xy") == b"abcdef"
