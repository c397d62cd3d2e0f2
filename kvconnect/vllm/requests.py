"""Reads vLLM's requests: their parents and batches, the identity of their prompts, how prompts are cut.

vLLM names the request for prompt ``i`` of a completion ``cmpl-NAME-i-RANDOM``, where clients may choose NAME,
and makes children ``0_ID``, ``1_ID`` and so on of a request that asks for several answers.
Imports no vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvconnect.halves.scheduler_half import SchedulerHalf
from kvconnect.peer.handles import digest_prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# Ids that a client chose in part have a prefix of vLLM's own.
_CHILD = re.compile(r"\A[0-9]+_(?=.)", re.DOTALL)
_PROMPT_OF_BATCH = re.compile(r"(?:[0-9]+_)?(cmpl-.*)-([0-9]{1,9})-[0-9a-f]{8}", re.DOTALL)


def parent_of(request_id: str) -> str:
    """The id of the request that a child was made of; of any other request, its own id."""
    return _CHILD.sub("", request_id)


def batch_of(request_id: str) -> tuple[str, int]:
    """The common name of the prompts of one completion, and this one's number. Without a batch: "", 0.

    One answer to all prompts carries the ``kv_transfer_params`` of the first.
    """
    found = _PROMPT_OF_BATCH.fullmatch(request_id)
    return (found[1], int(found[2])) if found else ("", 0)


def cached_tokens(request: Request) -> int:
    """The prompt's tokens in vLLM's own prefix cache, as its metrics count them, at the first admission."""
    stats = getattr(request, "prefill_stats", None)
    return 0 if stats is None else int(stats.num_local_cached_tokens)


def introduce(half: SchedulerHalf, request: Request, *, names_adapters: bool = True) -> None:
    """Register a new request with the scheduler half.

    ``names_adapters``: hashes depend on an adapter's contents. Otherwise no KV of an adapter is kept.
    """
    # With prompt log probabilities vLLM computes the whole prompt, even where a part could be loaded.
    reads, writes = not request.get_skip_reading_prefix_cache(), not getattr(request, "resumable", False)
    is_told = names_adapters or getattr(request, "lora_request", None) is None
    half.new_request(request, reads=reads and is_told, writes=writes and is_told)


def shorten(request: Request, excess: int) -> None:
    """Cut the last ``excess`` tokens off a prompt that was not scheduled yet, and generate one token only."""
    request.max_tokens = 1
    if not excess:
        return
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (prompt := getattr(request, name, None)) is not None:
            setattr(request, name, prompt[:-excess])
    # In place: vLLM has handed out read-only views of this list.
    del request._all_token_ids[-excess:]
    request.num_prompt_tokens -= excess


def prompt_digest(request: Request, num_tokens: int, adapters: Adapters) -> bytes | None:
    """The digest of a request's first tokens, and of the keys by which vLLM distinguishes equal tokens.

    It is the same for every vLLM version, while block hashes differ. None for the stand-in with a prompt of
    one token that vLLM submits, and aborts, for a request that ended before it reached the scheduler.
    """
    if getattr(request, "abort_immediately", False):
        return None
    return digest_prompt(request.all_token_ids[:num_tokens], _keys(request, num_tokens, adapters))


def _keys(request: Request, num_tokens: int, adapters: Adapters) -> Iterator[tuple[str | int | bytes, ...]]:
    lora = request.lora_request
    if lora is not None:
        yield "lora", adapters.digest(lora)
    if request.cache_salt:
        yield "salt", request.cache_salt
    for feature in request.mm_features or ():
        if feature.mm_position.offset < num_tokens:
            yield "mm", feature.identifier, feature.mm_position.offset, feature.mm_position.length
    if request.prompt_embeds is not None:
        embeds = request.prompt_embeds[:num_tokens].contiguous().cpu()
        yield "embeds", str(embeds.dtype), hashlib.sha256(embeds.view(torch.uint8).numpy()).digest()


# Adapters

_MOST = 4096
_SUFFIXES = (".safetensors", ".bin", ".pt")
_CONFIGURATION = "adapter_config.json"
_BYTES = 16

_Stamps = dict[str, tuple[int, int, int]]


class Adapters:
    """Digests of LoRA adapters by the id under which they are loaded. The ``_MOST`` used last are remembered.

    An adapter is known by its contents, because a name and a path may have other weights tomorrow. Its files
    are read when a request names it first, before a worker loads it; later only their stamps are compared.

    An adapter whose files change while it is loaded, or cannot be read, gets a unique digest: its KV is
    exchanged with no peer, and found by this process only.
    """

    def __init__(self) -> None:
        # The stamps of its files, the digest, and whether it is of their contents.
        self._known: OrderedDict[int, tuple[_Stamps, bytes, bool]] = OrderedDict()

    def digest(self, lora: Any) -> bytes:
        """A digest of every byte of an adapter's weights and configuration, ``_BYTES`` long. Never raises."""
        number, now = int(lora.lora_int_id), _stamps(str(lora.lora_path))
        stamps, known, is_read = self._known.get(number, ({}, b"", False))
        is_reloaded = bool(getattr(lora, "load_inplace", False))
        if not known or stamps != now or (is_reloaded and not is_read):
            is_read = bool(now) and (not known or is_reloaded)
            if known and not is_reloaded:
                logger.warning(
                    "the files of adapter %r have changed since it was loaded under id %d: its KV is "
                    "exchanged with no peer until it is loaded anew",
                    lora.lora_name,
                    number,
                )
            known = _read(str(lora.lora_path), now) if is_read else uuid.uuid4().bytes
            self._known[number] = now, known, is_read
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(number)
        return known


def named_with(name: bytes, digest: bytes) -> bytes:
    """The name of a block computed with an adapter, made of vLLM's name for the block."""
    # vLLM's name is a digest already, and depends on the adapter's name and path.
    mask = (digest * (len(name) // len(digest) + 1))[: len(name)]
    return (int.from_bytes(name, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(name), "big")


def _stamps(folder: str) -> _Stamps:
    """Size, modification time and inode of an adapter's weight files and its configuration, by path."""
    try:
        with os.scandir(folder) as found:
            files = [one for one in found if one.name == _CONFIGURATION or one.name.endswith(_SUFFIXES)]
        stats = {one.path: one.stat() for one in files}
    except OSError:
        return {}
    return {path: (stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in sorted(stats.items())}


def _read(folder: str, files: Iterable[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=_BYTES)
    try:
        for file in files:
            content = Path(file).read_bytes()
            digest.update(f"{os.path.basename(file)} {len(content)}\n".encode())
            digest.update(content)
    except OSError as error:
        logger.warning(
            "the adapter in %r cannot be read, and its KV is exchanged with no peer: %s", folder, error
        )
        return uuid.uuid4().bytes
    return digest.digest()
