"""Which vLLM this is, and whether it can do what a connector cannot do without. Imports no vLLM.

What a vLLM can do is found by looking, never by comparing versions: these are only warned of.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from kvconnect.errors import ConfigError
from kvconnect.packages import package_versions

logger = logging.getLogger(__name__)

OLDEST = (0, 30)
NEWEST = (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def vllm_version() -> str:
    """The version of the vLLM that is installed, or an empty string."""
    return package_versions().get("vllm", "")


@functools.cache
def check_vllm(base: Any) -> None:
    """Look at vLLM's module of base classes before anything relies on it. Raises ``ConfigError``."""
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
