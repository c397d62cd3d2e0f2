"""Every bound of the HTTP front, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass

MAX_BODY_BYTES = 8 * 1024 * 1024
DRAIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class FrontLimits:
    """What clients can make a front hold.

    Attributes:
        max_connections: open at once; more are answered with 503 and closed.
        max_requests: given to the engine and not ended by it; more are answered with 503.
        max_bodies_bytes: of bodies being read, beyond ``free_body_bytes`` of each; more gets 503.
        max_params_bytes: of a request's transfer parameters, as JSON.
        body_timeout_s: for a client to send its whole body.
        first_request_timeout_s: for a new connection to send a first request; afterwards it is closed.
    """

    max_connections: int = 4096
    max_requests: int = 2048
    max_bodies_bytes: int = 256 << 20
    free_body_bytes: int = 64 << 10
    max_params_bytes: int = 64 << 10
    body_timeout_s: float = 30.0
    first_request_timeout_s: float = 60.0
