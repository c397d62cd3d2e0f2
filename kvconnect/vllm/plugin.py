"""The plugin entry point: registers the name ``KVConnect`` with vLLM, and wraps what vLLM has no hook for.

vLLM runs it in every process of every server, also without a connector, and may run it more than once: so it
imports nothing slow. vLLM's factory is loaded in all these processes anyway. What a release of vLLM supports
beyond what all of 0.30 to 0.33 have is read from its classes; its version only leads to a warning.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from multiprocessing import parent_process
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
"""The fields of vLLM's ``KVTransferConfig`` that kvconnect reads."""


def register() -> None:
    """Register ``KVConnect`` with vLLM's factory, and have a process that reads server options check them.

    Each once per process: the module of options may be imported later than this was called first.
    """
    _register_name()
    # A process that reads a server's options has this module by now, unlike others: it is slow to import.
    if (options := sys.modules.get("vllm.engine.arg_utils")) is not None:
        _check_early(options)


@functools.cache
def _register_name() -> None:
    """Register ``KVConnect`` with vLLM's factory, which ``MultiConnector`` uses too."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(NAME, "kvconnect.vllm.connector", NAME)
    except ValueError as error:
        # Another plugin has the name. A configuration with our module path still finds our class.
        logger.warning(
            'another plugin of vLLM has the name %s: add "kv_connector_module_path": "kvconnect.vllm" to '
            "kv_transfer_config (%s)",
            NAME,
            error,
        )


@functools.cache
def _check_early(options: Any) -> None:
    """Make vLLM check our configuration before it starts a process or loads a model.

    No connector hook can: without CUDA graphs vLLM makes no connector before the model is loaded, and an
    error raised in a worker then is followed by the tracebacks of three processes.
    """
    create: Any = options.EngineArgs.create_engine_config

    @functools.wraps(create)
    def created_and_checked(self: Any, *arguments: Any, **more: Any) -> Any:
        made = create(self, *arguments, **more)
        given = made.kv_transfer_config
        # A server's later processes read the options again, when its workers may listen already.
        if given is not None and given.kv_connector in (NAME, "MultiConnector") and parent_process() is None:
            from kvconnect.vllm.settings import check_before_start

            check_before_start(made)
        return made

    options.EngineArgs.create_engine_config = created_and_checked


_WAITS_FOR_BLOCKS = "PAUSED_NEW"
"""vLLM's name of the pause in which it waits; in its other pauses, requests keep their blocks."""


@functools.cache
def follow_pauses() -> None:
    """Have vLLM's scheduler call ``_paused`` of its connectors as its pause state changes. Once per process.

    Before vLLM sleeps it takes no new request and waits until no request holds blocks; only then it calls the
    workers. A request that is held for a decode node would delay that until its lease is over.

    To be called in the scheduler's process, which has vLLM's module by then. The method has no public name:
    those are vLLM's hooks.
    """
    scheduler = sys.modules["vllm.v1.core.sched.scheduler"].Scheduler
    set_state: Any = scheduler.set_pause_state

    @functools.wraps(set_state)
    def set_and_inform(self: Any, pause_state: Any, *arguments: Any, **more: Any) -> Any:
        result = set_state(self, pause_state, *arguments, **more)
        # A MultiConnector has several.
        for connector in getattr(self.connector, "_connectors", (self.connector,)):
            if (inform := getattr(connector, "_paused", None)) is not None:
                inform(is_paused=pause_state.name == _WAITS_FOR_BLOCKS)
        return result

    scheduler.set_pause_state = set_and_inform


# Which vLLM this is

OLDEST = (0, 30)
NEWEST = (0, 33)
RANGE = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def vllm_version() -> str:
    """The version of the installed vLLM, or an empty string."""
    # Not imported with this module, which every process of every server loads.
    from kvconnect.packages import package_versions

    return package_versions().get("vllm", "")


@functools.cache
def check_vllm(base: Any) -> None:
    """Check vLLM's module of connector base classes for the needed types. Raises ``ConfigError``."""
    from kvconnect.errors import ConfigError

    version = vllm_version()
    # Without a report of failed loads vLLM would compute on the blocks' old bytes, and answer wrong tokens.
    if not hasattr(base, "KVConnectorTransferResults"):
        raise ConfigError(
            f"vLLM {version or 'of an unknown version'} cannot be told that the KV of a request failed to "
            f"load; kvconnect accepts vLLM {RANGE}"
        )
    if not is_tested(version):
        logger.warning(
            "kvconnect is tested with vLLM %s, this is %s, whose connector interface may have changed: "
            "install a tested one",
            RANGE,
            version or "a vLLM of an unknown version",
        )


def is_tested(version: str) -> bool:
    """Whether kvconnect is tested with this version of vLLM."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def warn_of_known_faults(vllm_config: Any) -> None:
    """Warn of faults of this vLLM release that this configuration can meet, also without a connector."""
    if vllm_version().split("+")[0] == "0.30.0" and vllm_config.speculative_config is not None:
        logger.warning(
            "vLLM 0.30.0 with speculative_config may stop scheduling requests for ever, a fault of its own; "
            "use vLLM 0.31 or newer, or no speculative_config"
        )
