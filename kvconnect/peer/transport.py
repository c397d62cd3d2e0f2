"""What carries bytes from P to D and how fast: a message, and what both sides and their tools show of it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvconnect.config import LaneKind
from kvconnect.engine.lanes import Lane

MOST_BYTES_PER_S = 1e15
MOST_TEXT = 256
BytesPerSecond = Annotated[float, msgspec.Meta(ge=0, le=MOST_BYTES_PER_S)]
_PRINTABLE = r"^[ -~]*\Z"
"""It is shown in logs."""
Text = Annotated[str, msgspec.Meta(max_length=MOST_TEXT, pattern=_PRINTABLE)]


class Transport(msgspec.Struct, frozen=True, array_like=True, tag="transport"):
    """P to D, once a connection and before the first fetch is served: what carries bytes, and how fast.

    ``bytes_per_s`` is what P's calibration reached, 0 where there was none; ``expected_bytes_per_s`` what the
    hardware should give, 0 where that is not known. ``known_by`` is empty for the engine's own word.
    ``refusal`` is why P will send nothing, by its own settings.
    """

    lane: LaneKind
    device: Text = ""
    known_by: Text = ""
    bytes_per_s: BytesPerSecond = 0.0
    expected_bytes_per_s: BytesPerSecond = 0.0
    refusal: Annotated[str, msgspec.Meta(max_length=4096, pattern=_PRINTABLE)] = ""

    @property
    def share(self) -> float:
        """Of the expected rate; 1 where either is not known."""
        known = self.bytes_per_s and self.expected_bytes_per_s
        return self.bytes_per_s / self.expected_bytes_per_s if known else 1.0

    def __str__(self) -> str:
        found = str(Lane(self.lane, self.device, self.known_by))
        if not self.bytes_per_s:
            return f"{found}, at a rate that was not measured"
        found += f", at {self.bytes_per_s / 1e9:.3g} GB/s"
        if not self.expected_bytes_per_s:
            return found
        return f"{found}, {self.share:.0%} of the {self.expected_bytes_per_s / 1e9:.3g} that it should give"
