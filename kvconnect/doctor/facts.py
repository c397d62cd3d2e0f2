"""Everything that the checks of this machine look at, and the probes that find it out."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvconnect.addresses import is_loopback
from kvconnect.config import ExtraConfig, TransferConfig
from kvconnect.doctor.machine import Machine, PortState, look, look_at_port
from kvconnect.doctor.trial import Trial, TrialSettings, run_trial
from kvconnect.engine.registry import available_engines
from kvconnect.errors import ConfigError, PeerError
from kvconnect.peer.asking import TimedDescription, describe
from kvconnect.peer.key_files import user_key_path
from kvconnect.peer.keyring import KEY_VARIABLE, KEYS_DIR_VARIABLE, Keyring, described, load_keyring

_CHOICE = ("nixl", "mooncake")
"""What ``auto`` takes, the first that works. Others are tried where they are configured."""


@dataclass(frozen=True)
class Probes:
    """What looks at the machine, its libraries and its network. A test replaces one, and nothing else."""

    machine: Callable[[], Machine] = look
    engines: Callable[[], Mapping[str, str]] = available_engines
    trial: Callable[..., Trial] = run_trial
    port: Callable[[str, int], PortState] = look_at_port
    describe: Callable[..., TimedDescription] = describe


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found out.

    ``engines`` are the registered ones, each with why it does not work here. ``engine`` is what is used,
    empty for nothing; ``trials`` are those that were tried. ``key`` describes the keys, ``key_problem``
    why there are none. ``own`` is what listens on the configured port, if it is a node of ours, else
    ``own_problem``.
    """

    config: TransferConfig | None
    machine: Machine
    engines: Mapping[str, str]
    engine: str
    trials: Mapping[str, Trial]
    interfaces: tuple[str, ...] = ()
    key: str = ""
    key_problem: str = ""
    port: PortState = field(default_factory=PortState)
    bootstrap_port: PortState = field(default_factory=PortState)
    keyring: Keyring | None = None
    own: TimedDescription | None = None
    own_problem: str = ""

    @property
    def extra(self) -> ExtraConfig:
        """The settings, or those of a node without any."""
        return self.config.extra if self.config is not None else ExtraConfig()


def gather(config: TransferConfig | None, probes: Probes, environ: Mapping[str, str] = os.environ) -> Facts:
    """Find out everything about this machine and this configuration. Takes some seconds, for the engines."""
    extra = config.extra if config is not None else ExtraConfig()
    engines = probes.engines()
    engine = extra.engine
    if engine == "auto":
        engine = next((name for name in _CHOICE if engines.get(name) == ""), "")
    key = key_problem = own_problem = ""
    own, keyring = None, None
    try:
        key, keyring = _keys(extra, environ)
    except ConfigError as error:
        key_problem = str(error)
    port = probes.port(extra.host, extra.port)
    if port.taken and not key_problem:
        try:
            own = probes.describe(extra, keyring, (extra.host, extra.port))
        except PeerError as error:
            own_problem = str(error)
    return Facts(
        config=config,
        machine=probes.machine(),
        engines=engines,
        engine=engine,
        trials=_trials(extra, engine, engines, probes),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        key=key,
        key_problem=key_problem,
        port=port,
        bootstrap_port=probes.port(extra.host, extra.bootstrap_port),
        keyring=keyring,
        own=own,
        own_problem=own_problem,
    )


def _keys(extra: ExtraConfig, environ: Mapping[str, str]) -> tuple[str, Keyring | None]:
    """The keys and what they are. Makes none. Raises ``ConfigError``."""
    is_named = extra.key_file or extra.keys_dir or environ.get(KEY_VARIABLE) or environ.get(KEYS_DIR_VARIABLE)
    of_user = user_key_path(environ)
    if not extra.insecure and not is_named and is_loopback(extra.host) and not of_user.exists():
        return f"none yet; the first node of this user makes {of_user}", None
    keyring = load_keyring(extra, environ)
    return described(keyring), keyring


def _trials(extra: ExtraConfig, engine: str, engines: Mapping[str, str], probes: Probes) -> dict[str, Trial]:
    """Try the engine that is used as it is configured, and the others that ``auto`` may take as they are."""
    asked = {
        name: TrialSettings(name, extra.host, extra.protocol, extra.all_engine_options)
        if name == engine
        else TrialSettings(name, extra.host)
        for name in dict.fromkeys((engine, *_CHOICE))
        if engines.get(name) == ""
    }
    far = not is_loopback(extra.host)
    with ThreadPoolExecutor(2) as pool:
        tried = {name: pool.submit(probes.trial, one, to_other_hosts=far) for name, one in asked.items()}
        return {name: one.result() for name, one in tried.items()}
