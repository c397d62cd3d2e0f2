"""The store's process as a tier sees it: it is being started, it is up, or it is left alone for a while.

A store that cannot be reached, or does not answer in time, is one that has nothing. It is tried again when
somebody asks for something, ever more seldom while that fails.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from kvconnect.engine.store_talk import Order, Verb
from kvconnect.errors import KVConnectError

logger = logging.getLogger(__name__)

UNREACHABLE_CODES = range(-999, -899)
"""What the library says where its master does not answer."""
_GOODBYE_S = 3.0
_LONGEST_WAIT_S = 5.0


class Process(Protocol):
    """What a link needs of ``engine.store_process.StoreProcess``."""

    def ask(self, lane: int, order: Order, timeout_s: float) -> Sequence[int]:
        """Raises ``EngineError``."""
        ...

    def kill(self) -> None:
        """End it; whatever it shared is nobody else's."""
        ...

    def close(self) -> None:
        """Kill it, and let go of everything."""
        ...


class LinkState(enum.Enum):
    """Whether a store can be asked."""

    STARTING = "starting"
    UP = "up"
    DOWN = "down"
    CLOSED = "closed"


class StoreLink:
    """Starts the process, and starts it again. ``changed`` guards it and what its owner adds.

    Args:
        start: makes a process; called on the link's thread, which ends last. Raises ``EngineError``.
        changed: notified whenever ``state`` changes.
        on_failure: called with a reason when the process was lost, on any thread.
        call_timeout_s: how long an order may take; then the process is killed.
        retry_s: how long a store is left alone that could not be used, the first time and at most.
        says_goodbye: whether the store must hear that the process ends; a second and more where it has memory
            of the store.
    """

    def __init__(
        self,
        start: Callable[[], Process],
        changed: threading.Condition,
        on_failure: Callable[[str], None],
        *,
        call_timeout_s: float,
        retry_s: tuple[float, float],
        says_goodbye: bool = True,
    ) -> None:
        self._start, self._changed, self._on_failure = start, changed, on_failure
        self._says_goodbye = says_goodbye
        self._call_timeout_s, self._retry_s = call_timeout_s, retry_s
        self.state = LinkState.STARTING
        self._process: Process | None = None
        self._wanted = True
        self._pause_s, self._retry_at = retry_s[0], 0.0
        self._complained = False
        self._users = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-store", daemon=True)

    def begin(self) -> None:
        """Start the process, in the background."""
        self._thread.start()

    def want(self) -> None:
        """Somebody asks for something: try again, unless that was just done. With ``changed`` held."""
        if self.state is LinkState.DOWN and not self._wanted:
            self._wanted = True
            self._changed.notify_all()

    def ask(self, lane: int, order: Order) -> Sequence[int] | None:
        """Give the process an order and wait; None: it is lost, and so is what was ordered."""
        with self._changed:
            process = self._process
            if self.state is not LinkState.UP or process is None:
                return None
            self._users += 1
        codes: Sequence[int] | None = None
        trouble = "an error of our own"
        try:
            codes = process.ask(lane, order, self._call_timeout_s)
            trouble = "its master does not answer" if any(code in UNREACHABLE_CODES for code in codes) else ""
        except KVConnectError as error:
            trouble = str(error)
        finally:
            self._asked(process, trouble)
        return None if trouble else codes

    def _asked(self, process: Process, trouble: str) -> None:
        if trouble:
            # Dead before anybody goes on: what it shared is then nobody else's.
            process.kill()
        with self._changed:
            self._users -= 1
            self._changed.notify_all()
            if not trouble:
                self._pause_s = self._retry_s[0]
            elif self._process is process and self.state is LinkState.UP:
                self._lose(trouble)

    def lose(self, why: str) -> None:
        """Use the process no more: something about the store is wrong."""
        with self._changed:
            if self.state is LinkState.UP:
                self._lose(why)

    def close(self, timeout_s: float) -> bool:
        """End the process. Whether it has ended, and with it all use of what it shared."""
        with self._changed:
            self.state = LinkState.CLOSED
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _lose(self, why: str) -> None:
        self.state = LinkState.DOWN
        self._wanted = False
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._retry_s[1])
        self._changed.notify_all()
        self._on_failure("store_unreachable")
        if not self._complained:
            self._complained = True
            logger.warning("the store cannot be used, nothing is kept there until it can: %s", why)

    def _run(self) -> None:
        while True:
            self._start_once()
            with self._changed:
                while not self._must_act():
                    pause_s = self._retry_at - time.monotonic() if self._wanted else _LONGEST_WAIT_S
                    self._changed.wait(min(max(pause_s, 0.01), _LONGEST_WAIT_S))
                process, self._process = self._process, None
                is_closed = self.state is LinkState.CLOSED
                # Whoever is in the middle of an order finds the process dead or finishes soon.
                if process is not None and not is_closed:
                    process.kill()
                if is_closed:
                    self._changed.wait_for(lambda: not self._users, _GOODBYE_S)
            if process is not None:
                self._end(process, politely=is_closed and self._says_goodbye and not self._users)
            if is_closed:
                return

    def _must_act(self) -> bool:
        if self.state is LinkState.CLOSED:
            return True
        if self._users:
            return False
        return self.state is LinkState.DOWN and self._wanted and time.monotonic() >= self._retry_at

    def _start_once(self) -> None:
        process: Process | None = None
        why = ""
        try:
            process = self._start()
        except KVConnectError as error:
            why = str(error)
        except Exception as error:
            logger.exception("the store's process could not be started")
            why = f"{type(error).__name__}: {error}"
        with self._changed:
            if self.state is LinkState.CLOSED:
                self._process = process
                return
            if process is None:
                self._lose(why)
                return
            self._process, self.state = process, LinkState.UP
            self._changed.notify_all()
            if self._complained:
                self._complained = False
                logger.info("the store can be used again")

    def _end(self, process: Process, *, politely: bool) -> None:
        if politely:
            try:
                # The store takes note of memory that goes; it need not find that out by itself.
                process.ask(0, Order(Verb.CLOSE), _GOODBYE_S)
            except KVConnectError as error:
                logger.debug("the store's process was not closed: %s", error)
        process.close()
