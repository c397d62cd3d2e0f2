"""Whether another process of this host still runs, so cheaply that it can be asked for every batch."""

from __future__ import annotations

import logging
import os
import select

from kvconnect.engine.nixl_peer import ProcessIdentity, is_dead

log = logging.getLogger("kvconnect.engine")


class ProcessWatch:
    """An eye on one process of this host and pid namespace.

    A file descriptor of the process becomes readable when it ends, which takes a microsecond to ask. Where
    the system has none, its entry in /proc is read each time.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        self._process = process
        self._gone = False
        self._poll: select.poll | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.pidfd_open(process.pid)
        except (OSError, OverflowError) as error:
            log.debug("process %d has no descriptor: %s", process.pid, error)
        else:
            self._poll = select.poll()
            self._poll.register(self._descriptor, select.POLLIN)
        # Asked after it was opened, so that the descriptor is not of a later process with this number.
        self._gone = is_dead(process)

    @property
    def gone(self) -> bool:
        """The process has ended, and it will not come back."""
        if not self._gone:
            self._gone = bool(self._poll.poll(0)) if self._poll is not None else is_dead(self._process)
        return self._gone

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        self._poll = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
