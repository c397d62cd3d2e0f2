"""A worker's answers to questions of peers: by topic, one function that only reads.

Owned by the transfer thread, which calls the function between two turns: it must be quick, or bounded.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from kvconnect.peer.messages import Answer, Question
from kvconnect.transfer.parts import Timers

logger = logging.getLogger(__name__)

_HEADER_BYTES = 4096
_MOST_WAITING = 64
_PAUSE_S = 0.05
"""Seconds between answers: a page of the timeline takes some milliseconds."""

Reader = Callable[[str], bytes]
"""Takes the question's argument. An exception becomes the answer's error."""


class Topics:
    """Topics by name. An answer, with its frame, has at most ``max_bytes``."""

    def __init__(self, max_bytes: int, timers: Timers) -> None:
        self._max_bytes = max_bytes
        self._readers: dict[str, Reader] = {}
        self._waiting: deque[tuple[Question, Callable[[Answer], None]]] = deque()
        self._next_at = 0.0
        self._timer = timers.timer(self._answer_next)

    def add(self, topic: str, reader: Reader) -> None:
        """Answer questions of this topic from now on. To be called before the first peer is served."""
        self._readers[topic] = reader

    def ask(self, question: Question, reply: Callable[[Answer], None], now: float) -> None:
        """Take a question, and answer it at once or in its turn: answers take the thread's time."""
        if len(self._waiting) >= _MOST_WAITING:
            reply(Answer(question.number, b"", f"{_MOST_WAITING} questions wait for their answers already"))
            return
        self._waiting.append((question, reply))
        if now >= self._next_at:
            self._answer_next(now)
        else:
            self._timer.by(self._next_at)

    def _answer_next(self, now: float) -> None:
        if not self._waiting:
            return
        self._next_at = now + _PAUSE_S
        question, reply = self._waiting.popleft()
        if self._waiting:
            self._timer.at(self._next_at)
        reply(self.answer(question))

    def answer(self, question: Question) -> Answer:
        """The one answer to a question. Raises nothing."""
        reader = self._readers.get(question.topic)
        if reader is None:
            known = ", ".join(sorted(self._readers)) or "none"
            return Answer(question.number, b"", f"topic is {question.topic!r}, accepted: {known}")
        try:
            data = reader(question.argument)
        except Exception as error:
            logger.debug("a question for %s could not be answered", question.topic, exc_info=error)
            return Answer(question.number, b"", f"{type(error).__name__}: {error}")
        if len(data) > self._max_bytes - _HEADER_BYTES:
            return Answer(
                question.number, b"", f"the answer has {len(data)} bytes, at most {self._max_bytes}"
            )
        return Answer(question.number, data)
