"""The child process that uses Mooncake Store: ``python -m kvconnect.engine.mooncake_store``.

The library holds the GIL during set-up and close, for more than a minute if its master does not answer, and
ends the process on a call after close. So it runs in a child process, which receives orders and sends
answers over inherited sockets, and shares memory with its parent for the values. If the child fails, the
parent only loses a cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import os
import signal
import socket
import sys
import threading
from typing import Any

import msgspec

from kvconnect.addresses import split_address
from kvconnect.engine.mooncake_library import prepare_environment
from kvconnect.engine.store_process import Order, Settings, StoreAnswer, Verb, receive, send
from kvconnect.errors import EngineError

_PR_SET_PDEATHSIG = 1
_CONNECT_TIMEOUT_S = 2.0
# How long one transfer of the library may take.
_TRANSFER_TIMEOUT_S = 5
# Mooncake's own memory for values outside of registered memory; there are no such values.
_LOCAL_BUFFER_BYTES = 1 << 20


class MooncakeStore:
    """The library's store, with the shared memory for values registered.

    Raises ``EngineError``: the library is missing, or the store cannot be reached.
    """

    def __init__(self, settings: Settings, memory: mmap.mmap) -> None:
        prepare_environment(settings.protocol, "", _TRANSFER_TIMEOUT_S)
        _reach(settings.master)
        self._store: Any = _load_library().MooncakeDistributedStore()
        code = self._store.setup(
            settings.host,
            settings.metadata,
            settings.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            settings.protocol,
            "",
            settings.master,
        )
        if code:
            raise EngineError(f"Mooncake Store at {settings.master} could not be set up: code {code}")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if memory and (code := self._store.register_buffer(self._address, len(memory))):
            raise EngineError(f"Mooncake Store did not register {len(memory)} bytes: code {code}")

    def carry_out(self, order: Order) -> list[int]:
        """Execute an order: a code of the library per key, below 0 for an error; one code for ``CLOSE``."""
        keys = list(order.keys)
        places = [self._address + offset for offset in order.offsets]
        match order.verb:
            case Verb.PUT:
                return list(self._store.batch_put_from(keys, places, list(order.lengths)))
            case Verb.GET:
                return list(self._store.batch_get_into(keys, places, list(order.lengths)))
            case Verb.EXIST:
                return list(self._store.batch_is_exist(keys))
            case Verb.REMOVE:
                return [self._store.remove(key, True) for key in keys]
            case Verb.CLEAR:
                return [self._store.remove_by_regex(f"^{key}", True) for key in keys]
            case Verb.CLOSE:
                return [self._store.close()]


def _load_library() -> Any:
    try:
        with contextlib.suppress(ImportError):
            return importlib.import_module("mooncake.store")
        # A CUDA build may need libraries that torch brings. Tried second: importing torch takes long.
        importlib.import_module("torch")
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise EngineError(f"Mooncake Store is not usable: {error}") from error


def _reach(master: str) -> None:
    """Raises ``EngineError``: nothing listens at the address. The library would take minutes to find out."""
    address = split_address(master)
    if address is None:
        raise EngineError(f"Mooncake Store's master is {master!r}, accepted: host:port")
    try:
        socket.create_connection(address, _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise EngineError(f"Mooncake Store's master does not answer at {master}: {error}") from error


def _serve(store: MooncakeStore, lane: socket.socket) -> None:
    """Answer the orders of one lane until the parent closes its end; then exit the process."""
    try:
        while (order := receive(lane, Order)) is not None:
            try:
                answer = StoreAnswer(tuple(store.carry_out(order)))
            except Exception as error:
                answer = StoreAnswer((), f"{type(error).__name__}: {error}")
            send(lane, answer)
    finally:
        # Not ``sys.exit``: the library would join its threads, which can take a minute.
        os._exit(0)


def main() -> None:
    """Set up the store, report the result on every lane, and serve the lanes. ``argv[1]``: JSON settings."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    if os.getppid() != settings.parent:
        return
    lanes = [socket.socket(fileno=descriptor) for descriptor in settings.lanes]
    length_bytes = os.fstat(settings.memory).st_size
    memory = mmap.mmap(settings.memory, length_bytes)
    try:
        store = MooncakeStore(settings, memory)
    except Exception as error:
        for lane in lanes:
            send(lane, StoreAnswer((), str(error)))
        os._exit(1)
    for lane in lanes:
        send(lane, StoreAnswer(()))
    threads = [threading.Thread(target=_serve, args=(store, lane)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
