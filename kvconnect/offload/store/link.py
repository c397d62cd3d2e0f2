"""The store's process as a tier sees it: it is being started, it is up, or it is left alone for a while.

A store that cannot be reached, or does not answer in time, is one that has nothing. It is tried again when
something is asked of it, ever more seldom while that fails.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvconnect.engine.store_process import Order, StoreProcess, Verb
from kvconnect.errors import KVConnectError

logger = logging.getLogger(__name__)

UNREACHABLE_CODES = range(-999, -899)
"""What the library returns where its master does not answer."""
_GOODBYE_S = 3.0
_LONGEST_WAIT_S = 5.0


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
        call_timeout_s, retry_s, says_goodbye: see ``StoreTier``.
    """

    def __init__(
        self,
        start: Callable[[], StoreProcess],
        changed: threading.Condition,
        on_failure: Callable[[str], None],
        *,
        call_timeout_s: float,
        retry_s: tuple[float, float],
        says_goodbye: bool = True,
    ) -> None:
        self._start, self._changed, self._on_failure = start, changed, on_failure
        self._call_timeout_s, self._retry_s, self._says_goodbye = call_timeout_s, retry_s, says_goodbye
        self.state = LinkState.STARTING
        self._process: StoreProcess | None = None
        self._is_wanted = True
        self._pause_s, self._retry_at = retry_s[0], 0.0
        self._is_logged = False
        self._num_asking = 0
        self._thread = threading.Thread(target=self._run, name="kvconnect-store", daemon=True)
        self._thread.start()

    def want(self) -> None:
        """Something is asked of the store: try again, unless that was just done. With ``changed`` held."""
        if self.state is LinkState.DOWN and not self._is_wanted:
            self._is_wanted = True
            self._changed.notify_all()

    def ask(self, lane: int, order: Order) -> Sequence[int] | None:
        """Give the process an order and wait; None: it is lost, and so is what was ordered."""
        with self._changed:
            process = self._process
            if self.state is not LinkState.UP or process is None:
                return None
            self._num_asking += 1
        codes: Sequence[int] | None = None
        trouble = "an error of our own"
        try:
            codes = process.ask(lane, order, self._call_timeout_s)
            trouble = "its master does not answer" if any(code in UNREACHABLE_CODES for code in codes) else ""
        except KVConnectError as error:
            trouble = str(error)
        finally:
            if trouble:
                # Dead before the rows of this order are given up: then it can write no shared memory.
                process.kill()
            with self._changed:
                self._num_asking -= 1
                self._changed.notify_all()
                if not trouble:
                    self._pause_s = self._retry_s[0]
                elif self._process is process and self.state is LinkState.UP:
                    self._lose(trouble)
        return None if trouble else codes

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
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _lose(self, why: str) -> None:
        self.state = LinkState.DOWN
        self._is_wanted = False
        self._retry_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._retry_s[1])
        self._changed.notify_all()
        self._on_failure("store_unreachable")
        if not self._is_logged:
            self._is_logged = True
            logger.warning("the store cannot be used, nothing is kept there until it can: %s", why)

    def _run(self) -> None:
        is_closed = False
        while not is_closed:
            self._start_once()
            with self._changed:
                while not self._must_act():
                    pause_s = self._retry_at - time.monotonic() if self._is_wanted else _LONGEST_WAIT_S
                    self._changed.wait(min(max(pause_s, 0.01), _LONGEST_WAIT_S))
                process, self._process = self._process, None
                is_closed = self.state is LinkState.CLOSED
                if is_closed:
                    self._changed.wait_for(lambda: not self._num_asking, _GOODBYE_S)
            if process is not None:
                if is_closed and self._says_goodbye and not self._num_asking:
                    # The store takes note of memory that goes; it need not find that out by itself.
                    with contextlib.suppress(KVConnectError):
                        process.ask(0, Order(Verb.CLOSE), _GOODBYE_S)
                process.close()

    def _must_act(self) -> bool:
        """It is closed, or the next process is due, and no thread is in the middle of an order."""
        if self.state is LinkState.CLOSED:
            return True
        is_due = self.state is LinkState.DOWN and self._is_wanted and time.monotonic() >= self._retry_at
        return is_due and not self._num_asking

    def _start_once(self) -> None:
        process: StoreProcess | None = None
        why = ""
        try:
            process = self._start()
        except KVConnectError as error:
            why = str(error)
        except Exception as error:
            logger.exception("the store's process could not be started")
            why = f"{type(error).__name__}: {error}"
        with self._changed:
            self._process = process
            if self.state is LinkState.CLOSED:
                return
            if process is None:
                self._lose(why)
                return
            self.state = LinkState.UP
            self._changed.notify_all()
            if self._is_logged:
                self._is_logged = False
                logger.info("the store can be used again")
