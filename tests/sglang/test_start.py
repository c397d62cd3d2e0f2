"""Settings that cannot be used end a server's start with what would be accepted, before a model is loaded."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from kvconnect.node.children import ChildFailed
from tests.sglang.servers import decode_server, prefill_server

pytestmark = [pytest.mark.timeout(300), pytest.mark.servers]

MADE = {"prefill": prefill_server, "decode": decode_server}
GOOD = {"engine": "nixl"}


@pytest.mark.parametrize(
    ("role", "config", "options", "texts"),
    [
        ("prefill", None, (), ["KVCONNECT_CONFIG is not set"]),
        ("decode", None, (), ["KVCONNECT_CONFIG is not set"]),
        ("decode", '{"engin": "nixl"}', (), ["KVCONNECT_CONFIG", "engin"]),
        ("prefill", json.dumps({**GOOD, "key_file": "/no/such/key"}), (), ["/no/such/key"]),
        (
            "decode",
            json.dumps(GOOD),
            ("--disaggregation-enable-kv-checksum",),
            ["--disaggregation-enable-kv-checksum", "kvconnect"],
        ),
    ],
)
def test_a_start_that_is_refused(model, tmp_path, role, config, options, texts):
    environment = {"KVCONNECT_CONFIG": config}
    server = MADE[role](model, tmp_path, "kvconnect", options=options, environment=environment)
    server.start()
    try:
        with pytest.raises(ChildFailed, match="ended"):
            server.wait_ready()
    finally:
        server.kill()
    for text in texts:
        assert text in server.text()
    assert "Traceback" not in server.text()
