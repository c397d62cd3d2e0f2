"""What an operator may give a router."""

from __future__ import annotations

import pytest

from kvconnect.errors import ConfigError
from kvconnect.router.router_options import RouterLimits, clean_url, split_rank


@pytest.mark.parametrize(
    ("url", "base", "rank"),
    [
        ("http://h:8000@1", "http://h:8000", "1"),
        ("http://h:8000/@12", "http://h:8000", "12"),
        ("https://[::1]:80@0", "https://[::1]:80", "0"),
        ("http://h:8000/", "http://h:8000", ""),
    ],
)
def test_a_node_is_a_url_and_may_be_a_rank(url: str, base: str, rank: str) -> None:
    assert split_rank(clean_url(url)) == (base, rank)


WRONG = ["", "host:8000", "ftp://host", "http://", "http://h:x", "http://h:99999", "http://u:p@h"]
WRONG += ["http://u:p@10", "http://h?q=1", "http://h@x", "http://h@-1", "http://h:x@1", "ftp://h@1"]


@pytest.mark.parametrize("url", [*WRONG, "http://h@1@2"])
def test_what_is_no_node_url(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        clean_url(url)
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("prefill_timeout_s", 0), ("retries", -1), ("failures_to_eject", 0)]
)
def test_limits_are_checked(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        RouterLimits(**{name: value})
