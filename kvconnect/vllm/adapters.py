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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_MOST = 4096
_SUFFIXES = (".safetensors", ".bin", ".pt")
_CONFIGURATION = "adapter_config.json"
_BYTES = 16

_Stamp = tuple[tuple[int, int, int], ...]


class Adapters:
    """Digests of adapters by the id under which they are loaded. The ``_MOST`` used last are remembered.

    An adapter whose files change while it is loaded, or cannot be read, gets a digest that nothing else has:
    what it computes is exchanged with no peer, and found by this process only.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[tuple[str, ...], _Stamp, bytes]] = OrderedDict()

    def digest(self, lora: Any) -> bytes:
        """Of every byte of an adapter's weights and of its configuration. Raises nothing."""
        number = int(lora.lora_int_id)
        files, stamp, known = self._known.get(number, ((), (), b""))
        now = _stamp(files or _files(str(lora.lora_path)))
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
                files = _files(str(lora.lora_path))
                now = _stamp(files)
                known = _read(files) if now else uuid.uuid4().bytes
            self._known[number] = files, now, known
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        self._known.move_to_end(number)
        return known


def named_with(name: bytes, digest: bytes) -> bytes:
    """The name of a block that was computed with an adapter, of the name that it has without."""
    # vLLM's own name is a digest already, and has the adapter's name and path in it.
    mask = (digest * (len(name) // len(digest) + 1))[: len(name)]
    return (int.from_bytes(name, "big") ^ int.from_bytes(mask, "big")).to_bytes(len(name), "big")


def _files(path: str) -> tuple[str, ...]:
    """The files that an adapter is."""
    try:
        found = sorted(os.listdir(path))
    except OSError:
        return ()
    return tuple(f"{path}/{name}" for name in found if name == _CONFIGURATION or name.endswith(_SUFFIXES))


def _stamp(files: Iterable[str]) -> _Stamp:
    """What changes with the contents of files; nothing where one of them is not here."""
    try:
        stats = [os.stat(file) for file in files]
    except OSError:
        return ()
    return tuple((stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats)


def _read(files: Sequence[str]) -> bytes:
    digest = hashlib.blake2b(digest_size=_BYTES)
    try:
        for file in files:
            content = Path(file).read_bytes()
            digest.update(f"{os.path.basename(file)} {len(content)}\n".encode())
            digest.update(content)
    except OSError as error:
        logger.warning("an adapter cannot be read, and its KV is exchanged with no peer: %s", error)
        return uuid.uuid4().bytes
    return digest.digest()
