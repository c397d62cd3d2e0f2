"""What a LoRA adapter is, by its contents: one name and one path may have other weights tomorrow.

Read when a request names it first, which is before a worker loads it; from then on only looked at for change.
Imports no vLLM.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections import OrderedDict
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST = 4096
_SUFFIXES = (".safetensors", ".bin", ".pt")
_CONFIGURATION = "adapter_config.json"
_BYTES = 16

_Stamp = tuple[tuple[str, int, int, int], ...]


class Adapters:
    """Digests of adapters by the id under which they are loaded. The ``_MOST`` used last are remembered.

    An adapter whose files change while it is loaded, or cannot be read, gets a digest that nothing else has:
    what it computes is exchanged with nobody, and found by this process only.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[_Stamp, bytes]] = OrderedDict()

    def digest(self, lora: Any) -> bytes:
        """Of every byte of an adapter's weights and of its configuration. Raises nothing."""
        number, now = int(lora.lora_int_id), _stamp(str(lora.lora_path))
        stamp, known = self._known.get(number, ((), b""))
        if not known or stamp != now:
            if known and not getattr(lora, "load_inplace", False):
                logger.warning(
                    "the files of adapter %r have changed since it was loaded under id %d: its KV is "
                    "exchanged with no peer until it is loaded anew",
                    lora.lora_name,
                    number,
                )
                known = uuid.uuid4().bytes
            else:
                known = _read(str(lora.lora_path)) if now else uuid.uuid4().bytes
            self._known[number] = now, known
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(number)
        return known


def named_with(name: bytes, digest: bytes) -> bytes:
    """The name of a block that was computed with an adapter, of the name that it has without."""
    # vLLM's own name is a digest already, and has the adapter's name and path in it.
    mask = (digest * (len(name) // len(digest) + 1))[: len(name)]
    return (int.from_bytes(name, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(name), "big")


def _files(path: str) -> list[Path]:
    """The files that an adapter is."""
    folder = Path(path)
    try:
        found = sorted(folder.iterdir())
    except OSError:
        return []
    return [one for one in found if one.name == _CONFIGURATION or one.suffix in _SUFFIXES]


def _stamp(path: str) -> _Stamp:
    """What changes with the files' contents; nothing where they are not here."""
    try:
        with os.scandir(path) as entries:
            return tuple(
                sorted(
                    (entry.name, stat.st_size, stat.st_mtime_ns, stat.st_ino)
                    for entry in entries
                    if entry.name == _CONFIGURATION or entry.name.endswith(_SUFFIXES)
                    for stat in [entry.stat()]
                )
            )
    except OSError:
        return ()


def _read(path: str) -> bytes:
    digest = hashlib.blake2b(digest_size=_BYTES)
    try:
        for file in _files(path):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode())
            digest.update(content)
    except OSError as error:
        logger.warning(
            "the adapter in %s cannot be read, and its KV is exchanged with no peer: %s", path, error
        )
        return uuid.uuid4().bytes
    return digest.digest()
