"""The entry point through which vLLM learns the name ``KVConnect``, and has its configuration checked.

vLLM runs it in every process of every server, also where no connector is configured, and may run it more
than once: nothing is imported with it that takes time, and vLLM's factory is in all processes anyway.
What a vLLM can do is found by looking, never by comparing versions: of these it is only warned.
"""

from __future__ import annotations

import functools
import logging
import re
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


# Which vLLM this is

OLDEST = (0, 30)
NEWEST = (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def vllm_version() -> str:
    """The version of the vLLM that is installed, or an empty string."""
    # Not with this module, which every process of every server loads.
    from kvconnect.packages import package_versions

    return package_versions().get("vllm", "")


@functools.cache
def check_vllm(base: Any) -> None:
    """Look at vLLM's module of base classes before anything relies on it. Raises ``ConfigError``."""
    from kvconnect.errors import ConfigError

    version = vllm_version()
    # Otherwise it would go on with what the blocks held before, and answer with wrong tokens.
    if not hasattr(base, "KVConnectorTransferResults"):
        raise ConfigError(
            f"vLLM {version or 'of an unknown version'} cannot be told that the KV of a request failed to "
            f"load; kvconnect accepts vLLM {RANGE}"
        )
    if not is_tested(version):
        logger.warning(
            "kvconnect is tested with vLLM %s, this is %s: its connector interface may have changed",
            RANGE,
            version or "a vLLM of an unknown version",
        )


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is one that we test."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def warn_of_known_faults(vllm_config: Any) -> None:
    """Name the faults of this very release that this configuration can meet, with a connector or without."""
    if vllm_version().split("+")[0] == "0.30.0" and vllm_config.speculative_config is not None:
        logger.warning(
            "vLLM 0.30.0 with speculative_config may stop scheduling requests for ever, a fault of its own; "
            "use vLLM 0.31 or newer, or no speculative_config"
        )
