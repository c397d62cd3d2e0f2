"""What the HTTP servers of node and router share."""

from __future__ import annotations

import pytest

from kvconnect.node.http_server import BadRequest, parse_json, request_id_of


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="request body"):
        parse_json(raw)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [("", False), ("a b", False), ("x" * 513, False), ("ü", False), ("mine-1", True), ("x" * 512, True)],
)
def test_an_unfit_request_id_is_replaced(given: str, is_kept: bool) -> None:
    made = request_id_of({"X-Request-Id": given})
    assert (made == given) is is_kept
    assert is_kept or len(made) == 32
