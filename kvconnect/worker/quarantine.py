"""How long memory stays unused because somebody may still write to it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Quarantine:
    """Memory is to be left alone until then.

    ``is_unproven``: that nothing is written after ``until`` is likely, but not certain; whoever uses the
    memory then has to keep the writer out by other means.
    """

    until: float = 0.0
    is_unproven: bool = False

    def hasten(self, until: float, *, proven: bool) -> None:
        """There is news of whoever may write: it need not be waited for longer than until then.

        The first proof says when it is over, whatever was believed before; further ones would only put that
        off. What is only likely cannot shorten what a proof said.
        """
        if proven and self.is_unproven:
            self.until, self.is_unproven = until, False
        elif proven or self.is_unproven:
            self.until = min(self.until, until)

    def extend(self, until: float) -> None:
        """It is to be left alone at least until then."""
        self.until = max(self.until, until)

    def ends_unproven(self, now: float) -> bool:
        """The time is over, and nobody has said for certain that nothing is written any more."""
        return self.is_unproven and now >= self.until
