"""The entry point through which vLLM learns the name ``KVConnect``, without a module path.

vLLM runs it in every process of every server, also where no connector is configured, and may run it more
than once. It imports nothing of ours; vLLM's factory is in all of these processes anyway.
"""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)

NAME = "KVConnect"


@functools.cache
def register() -> None:
    """Make ``"kv_connector": "KVConnect"`` known to vLLM, and to its ``MultiConnector``. Once a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "kvconnect.vllm.connector", NAME)
    except ValueError as error:
        # Another plugin took the name. A configuration with our module path still finds our class.
        logger.warning("kvconnect is not found by the name %s alone: %s", NAME, error)
