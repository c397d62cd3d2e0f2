"""Settings that cannot be used end a server's start with what would be accepted, before a model is loaded."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed here; make test-sglang")

from kvconnect.node.children import ChildFailed
from tests.sglang.servers import decode_server, prefill_server

pytestmark = [pytest.mark.timeout(300), pytest.mark.servers]

CHECKSUM = "--disaggregation-enable-kv-checksum"


# Which settings these are: tests/sglang_contract/test_with_sglang.py.
@pytest.mark.parametrize(
    ("make", "config", "option", "text"),
    [
        (prefill_server, None, (), "KVCONNECT_CONFIG is not set"),
        (decode_server, "{}", (CHECKSUM,), CHECKSUM),
    ],
)
def test_a_start_that_is_refused(model, tmp_path, make, config, option, text):
    environment = {"KVCONNECT_CONFIG": config}
    server = make(model, tmp_path, "kvconnect", options=option, environment=environment)
    server.start()
    try:
        with pytest.raises(ChildFailed, match="ended"):
            server.wait_ready()
    finally:
        server.kill()
    assert text in server.text()
    assert "Traceback" not in server.text()
