"""Finds the side channels of a node's workers: given directly, or read from their server's metrics."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from kvconnect.addresses import split_address
from kvconnect.errors import ConfigError, PeerError
from kvconnect.metrics import PREFIX

_TIMEOUT_S = 10.0
_MOST_BYTES = 16 << 20


def side_channels(given: str, where: str) -> list[tuple[str, int]]:
    """The side channel at ``HOST:PORT``, or those of all workers of the server at a URL.

    Raises:
        ConfigError: neither of both; ``where`` names the option in the message.
        PeerError: no server answers, or none of its workers has reported its side channel.
    """
    if not given.startswith(("http://", "https://")):
        if (address := split_address(given)) is None:
            raise ConfigError(
                f"{where} is {given!r}; accepted: HOST:PORT of a side channel, or the URL of a server, as "
                "http://HOST:PORT"
            )
        return [address]
    page = given.rstrip("/").removesuffix("/metrics") + "/metrics"
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MOST_BYTES).decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (OSError, http.client.HTTPException, urllib.error.URLError, ValueError) as error:
        raise PeerError(f"{page} does not show the metrics of a server: {error}") from error
    found = [
        (sample.labels.get("engine", ""), int(sample.labels.get("rank", 0)), address)
        for sample in samples
        if sample.name.endswith(f"{PREFIX}_side_channel") and sample.value
        if (address := split_address(sample.labels.get("address", ""))) is not None
    ]
    if not found:
        raise PeerError(
            f"{page} has no {PREFIX}_side_channel: a vLLM server reports its workers with the first request "
            "that it serves; send it one, or give HOST:PORT of a side channel, which its log has"
        )
    return [address for _, _, address in sorted(found)]
