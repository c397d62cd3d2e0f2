"""The entry point through which vLLM learns the name ``KVConnect``, and has its configuration checked.

vLLM runs it in every process of every server, also where no connector is configured, and may run it more
than once. It imports nothing of ours; vLLM's factory is in all of these processes anyway.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger(__name__)

NAME = "KVConnect"
OURS = (
    "kv_connector",
    "kv_connector_module_path",
    "kv_role",
    "engine_id",
    "kv_load_failure_policy",
    "kv_connector_extra_config",
)
"""What we read of vLLM's ``KVTransferConfig``."""


@functools.cache
def register() -> None:
    """Make ``"kv_connector": "KVConnect"`` known to vLLM, and to its ``MultiConnector``. Once a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "kvconnect.vllm.connector", NAME)
    except ValueError as error:
        # Another plugin took the name. A configuration with our module path still finds our class.
        logger.warning("kvconnect is not found by the name %s alone: %s", NAME, error)
    check_when_read()


@functools.cache
def check_when_read() -> None:
    """Have our configuration checked as soon as vLLM has read it. Once a process.

    No hook of a connector does: without CUDA graphs vLLM gives it no configuration before the model is
    loaded, and what a worker raises then is followed by the tracebacks of three processes.
    """
    try:
        from vllm.config import KVTransferConfig

        read: Any = KVTransferConfig.__post_init__
    except (ImportError, AttributeError):
        return

    @functools.wraps(read)
    def read_and_checked(given: Any) -> None:
        read(given)
        if given.kv_connector == NAME:
            from kvconnect.config import parse_kv_transfer_config

            parse_kv_transfer_config({name: getattr(given, name) for name in OURS})

    KVTransferConfig.__post_init__ = read_and_checked
