"""The facts that the checks of this machine judge, and the probes that collect them."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from kvconnect.addresses import TAKEN, is_here, is_loopback, look_at_port
from kvconnect.config import ExtraConfig, TransferConfig, ranks_of
from kvconnect.engine.cuda_driver import supports_dmabuf
from kvconnect.engine.lanes import Fabric, look_at_fabric, read_text
from kvconnect.engine.registry import PREFERENCE, available_engines
from kvconnect.errors import ConfigError, PeerError
from kvconnect.packages import find_compiler, package_versions
from kvconnect.peer.asking import Answered, describe
from kvconnect.peer.description import Description
from kvconnect.peer.keyring import Keyring, described, load_keyring, names_key, user_key_path
from kvconnect.tools.trial import Trial, run_trial

VARIABLES = ("UCX_", "MC_", "NIXL_", "VLLM_", "PYTORCH_", "CUDA_VISIBLE_DEVICES")
"""Prefixes of environment variables that libraries read."""
_CAP_IPC_LOCK = 14


@dataclass(frozen=True, kw_only=True)
class Machine(Fabric):
    """The facts of this machine. Limits are in bytes or counts; None: unlimited.

    ``visible_gpus``: how many GPUs torch sees; ``has_dmabuf``: RDMA reaches them without a kernel module.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    has_peermem: bool = False
    visible_gpus: int = 0
    has_dmabuf: bool = False
    compiler: str = ""
    memlock_bytes: int | None = None
    may_lock: bool = False
    open_files: int | None = None
    shm_bytes: int = 0
    shm_free_bytes: int = 0
    environ: Mapping[str, str] = field(default_factory=dict)


def look(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """Collect the facts of the machine below ``root``. A source that cannot be read leaves its default."""
    shm = os.statvfs(root / "dev/shm") if (root / "dev/shm").is_dir() else None
    memlock, files = (
        resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    )
    capabilities = re.search(r"^CapEff:\s*(\w+)$", read_text(root / "proc/self/status"), re.M)
    visible_gpus = torch.cuda.device_count()
    return Machine(
        **vars(look_at_fabric(root, with_gpus=True)),
        versions=package_versions(),
        has_peermem="nvidia_peermem" in read_text(root / "proc/modules"),
        visible_gpus=visible_gpus,
        has_dmabuf=visible_gpus > 0 and supports_dmabuf(),
        compiler=find_compiler(environ),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        may_lock=capabilities is not None and bool(int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1),
        open_files=None if files == resource.RLIM_INFINITY else files,
        shm_bytes=shm.f_frsize * shm.f_blocks if shm else 0,
        shm_free_bytes=shm.f_frsize * shm.f_bavail if shm else 0,
        # Other variables may hold secrets.
        environ={name: value for name, value in environ.items() if name.startswith(VARIABLES)},
    )


class Facts:
    """All facts about this machine and this configuration, collected once, in some seconds.

    ``places``: the settings of each key of ``ranks``; ``absent`` ones are on other machines, and ``first`` is
    the first rank here. ``engines``: registered engines, each with why it does not work here, or "".
    ``engine``: the one in use, or "". ``trial``: its result, if it works. ``port`` (of the first rank here)
    and ``bootstrap_port``: as ``look_at_port`` finds them. ``key`` describes the keys; ``key_problem`` is why
    there are none. ``own`` describes our node that listens on ``port``; otherwise ``own_problem`` is why the
    listener is none. ``describe`` asks the worker at an address.
    """

    def __init__(self, config: TransferConfig | None) -> None:
        self.config = config
        given = config.extra if config is not None else ExtraConfig()
        self.places, self.absent, self.first = _ranks(given)
        self.extra = extra = given.here(self.first)
        port = extra.port and extra.port + self.first
        self.machine = look()
        self.engines = available_engines()
        self.engine = extra.engine
        if extra.engine == "auto":
            self.engine = next((name for name in PREFERENCE if self.engines.get(name) == ""), "")
        self.trial: Trial | None = None
        if self.engines.get(self.engine) == "":
            self.trial = run_trial(self.engine, extra.host, extra.protocol, extra.all_engine_options)
        self.interfaces = tuple(name for _, name in socket.if_nameindex())
        self.port = look_at_port(extra.listens_at, port)
        self.bootstrap_port = look_at_port(extra.listens_at, extra.bootstrap_port)
        self.key = self.key_problem = self.own_problem = ""
        self.keyring: Keyring | None = None
        self.own: Answered[Description] | None = None
        try:
            self.key, self.keyring = _keys(extra)
            self.describe = partial(describe, extra, self.keyring)
            if self.port == TAKEN:
                self.own = self.describe((extra.host, port))
        except ConfigError as error:
            self.key_problem = str(error)
        except PeerError as error:
            self.own_problem = str(error)


def _ranks(given: ExtraConfig) -> tuple[dict[str, ExtraConfig], set[str], int]:
    numbers = {key: ranks_of(key)[0].start for key in given.ranks}
    places = {key: given.of_rank(rank) for key, rank in numbers.items()}
    here = [
        key
        for key, own in places.items()
        if is_here(own.listens_at) and ("/" not in own.host or is_here(own.host))
    ]
    places |= {key: given.here(numbers[key]) for key in here}
    return places, set(places) - set(here), min((numbers[key] for key in here), default=0)


def _keys(extra: ExtraConfig) -> tuple[str, Keyring | None]:
    """A description of the keys, and the keys. Makes no keys. Raises ``ConfigError``."""
    of_user = user_key_path(os.environ)
    has_key = extra.insecure or names_key(extra, os.environ) or of_user.exists()
    if not has_key and is_loopback(extra.host):
        return f"none yet; the first node of this user makes {of_user}", None
    keyring = load_keyring(extra, os.environ)
    return described(keyring), keyring
