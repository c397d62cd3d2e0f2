"""Imports Mooncake, configures it through its environment, and makes it use one protocol.

Owns the environment variables that this package sets, each only if the user did not set it. In
mooncake-transfer-engine 0.3.13.post1 the ``protocol`` argument has no effect: the library discovers
transports, and takes RDMA if there is an adapter; only the environment can prevent that. An engine has one
transport, so an engine that uses NVLink reaches no other host.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvconnect.addresses import is_loopback, join_address
from kvconnect.engine.base import Span
from kvconnect.engine.cuda_driver import allocation_around
from kvconnect.engine.lanes import Transport
from kvconnect.errors import EngineError, listed

log = logging.getLogger("kvconnect.engine.mooncake")

NVLINK = "nvlink"
"""The protocol between GPUs of one host. Only the environment can select it in the library."""

Range = tuple[int, int]
"""An address and a length in bytes."""

_FORCED = ("MC_FORCE_TCP", "MC_FORCE_HCA", "MC_FORCE_MNNVL")


class Library:
    """The extension module, set up for one protocol, with the operations that all its engines share.

    The arguments are those of ``MooncakeEngine``. Raises ``EngineError``.
    """

    def __init__(self, host: str, protocol: str, device_name: str, timeout_s: int) -> None:
        self.protocol = choose_protocol(host, device_name) if protocol == "auto" else protocol
        prepare_environment(self.protocol, device_name, timeout_s)
        if ":" in host and not os.environ.get("MC_USE_IPV6"):
            # The library reads the variable when it is loaded, which may be before an engine is made.
            raise EngineError(
                f"host is {host!r}, and Mooncake listens for IPv4 alone: start with MC_USE_IPV6=1 in the "
                "environment"
            )
        self._module = load_library()
        self._host, self._device_name = host, device_name

    @property
    def is_tcp(self) -> bool:
        """Whether the protocol is TCP. Sending lanes then need no registered memory."""
        return self.protocol == "tcp"

    @property
    def carries(self) -> Transport:
        """The lane of all bytes."""
        if self.protocol == "rdma":
            return Transport("rdma", self._device_name)
        return Transport("nvlink" if self.protocol == NVLINK else "tcp")

    def make_engine(self) -> Any:
        """A transfer engine without registered memory. Raises ``EngineError``: it cannot start."""
        engine = self._module.TransferEngine()
        protocol = "rdma" if self.protocol == NVLINK else self.protocol
        code = engine.initialize(self._host, "P2PHANDSHAKE", protocol, self._device_name)
        if code != 0:
            raise EngineError(
                f"Mooncake cannot start at {self._host!r} with {self.protocol} {self._device_name!r}: it "
                f"returned {code}"
            )
        return engine

    def session_of(self, engine: Any) -> str:
        """The name by which peers reach an engine, ``host:port``."""
        return join_address(self._host, engine.get_rpc_port())

    def check_spans(self, spans: Iterable[Span]) -> None:
        """Raises ``EngineError``: the protocol or the build cannot move memory of a span's device."""
        for span in spans:
            if span.device == "cpu" and self.protocol == NVLINK:
                raise EngineError("protocol 'nvlink' moves memory of GPUs alone: set protocol to 'tcp'")
            if span.device != "cpu" and not built_for_cuda():
                raise EngineError(
                    f"cannot register memory of {span.device}: this build of Mooncake has no CUDA; "
                    "pip install 'kvconnect[mooncake]'"
                )

    def ranges(self, spans: Iterable[Span]) -> dict[Range, None]:
        """The ranges to register for spans: the spans, or over NVLink the allocations that contain them.

        Over NVLink the library shares whole allocations, and assumes that a range begins one.
        """
        if self.protocol == NVLINK:
            return {allocation_around(span.address, span.gpu): None for span in spans}
        return dict.fromkeys((span.address, span.length_bytes) for span in spans)

    def register(self, engine: Any, ranges: Iterable[Range]) -> None:
        """Register memory with an engine, in one call. Raises ``EngineError``: the library refuses."""
        columns = [list(column) for column in zip(*ranges, strict=True)]
        code = engine.batch_register_memory(*columns) if columns else 0
        if code != 0:
            hint = (
                ": over NVLink it must be allocated by cudaMalloc, without expandable_segments and sleep "
                "mode, or protocol be 'tcp'"
                if self.protocol == NVLINK
                else ""
            )
            raise EngineError(f"Mooncake cannot register {len(columns[0])} ranges, it returned {code}{hint}")

    def unregister(self, engine: Any, ranges: Iterable[Range]) -> None:
        """Unregister memory from an engine. Raises ``EngineError``: the library refuses."""
        addresses = [address for address, _ in ranges]
        code = engine.batch_unregister_memory(addresses) if addresses else 0
        if code != 0:
            raise EngineError(f"Mooncake cannot unregister {len(addresses)} ranges: it returned {code}")


def choose_protocol(host: str, device_name: str) -> str:
    """The protocol for ``auto``: NVLink if it can be used, else RDMA if adapters are named, else TCP."""
    problem = nvlink_problem(host)
    chosen = NVLINK if not problem else "rdma" if device_name else "tcp"
    log.info("Mooncake's protocol 'auto' takes %r%s", chosen, problem and f", not 'nvlink': {problem}")
    return chosen


def nvlink_problem(host: str) -> str:
    """Why this node cannot use NVLink for all of its peers; empty if it can."""
    # Imported here, since the store's process does not need torch.
    import torch

    if not is_loopback(host):
        return f"peers reach this node at {host}, and may be on other hosts"
    if not built_for_cuda():
        return "this build of Mooncake has no CUDA"
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process uses no GPU"
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get(
        "PYTORCH_ALLOC_CONF", ""
    ):
        return "memory in expandable segments cannot be shared"
    if forced := [name for name in _FORCED if os.environ.get(name)]:
        return f"{forced[0]} is set"
    # With a single visible GPU, its links to the GPUs of peers are unknown.
    pairs = list(itertools.permutations(range(torch.cuda.device_count()), 2))
    if pairs and not any(torch.cuda.can_device_access_peer(here, there) for here, there in pairs):
        return "no GPU here can access another one's memory (nvidia-smi topo -p2p r)"
    return ""


def prepare_environment(protocol: str, device_name: str, library_timeout_s: int) -> None:
    """Set the environment for a protocol. Raises ``EngineError``: the protocol cannot be used here."""
    if protocol == "tcp":
        if os.environ.get("MC_FORCE_HCA"):
            raise EngineError("protocol 'tcp' was asked for, but MC_FORCE_HCA forces RDMA: unset it")
        # Otherwise the library uses RDMA if it finds an adapter.
        os.environ.setdefault("MC_FORCE_TCP", "1")
    elif protocol == "rdma":
        if os.environ.get("MC_FORCE_TCP"):
            raise EngineError(
                "protocol 'rdma' was asked for, but MC_FORCE_TCP is set, by the environment or by an "
                "engine of this process that uses 'tcp'"
            )
        _check_adapters(device_name)
    elif protocol == NVLINK:
        for name in _FORCED:
            if os.environ.get(name):
                raise EngineError(f"protocol 'nvlink' was asked for, but {name} is set: unset it")
        if not built_for_cuda():
            raise EngineError(
                "protocol 'nvlink' needs Mooncake built with CUDA; pip install 'kvconnect[mooncake]'"
            )
        os.environ.setdefault("MC_INTRANODE_NVLINK", "true")
    else:
        raise EngineError(f"protocol is {protocol!r}: Mooncake engines know 'tcp', 'rdma' and 'nvlink'")
    # At INFO the library logs every batch to standard error; errors are returned as codes.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    # A transfer to a peer that hangs blocks its thread for this long; the library's default is 30 s.
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(max(int(library_timeout_s), 5)))


def _check_adapters(device_name: str) -> None:
    root = Path("/sys/class/infiniband")
    found = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    wanted = [name.strip() for name in device_name.split(",") if name.strip()]
    missing = [name for name in wanted if name not in found]
    if not found:
        raise EngineError(
            f"protocol 'rdma' needs adapters {device_name or '(any)'}, and {root} has none: set "
            "kv_connector_extra_config.protocol to 'tcp', or give the container the host's RDMA devices"
        )
    if missing:
        raise EngineError(
            f"kv_connector_extra_config.device_name has {listed(missing)}; accepted: {listed(found)}, ''"
        )


def load_library() -> Any:
    """Import the extension module. Raises ``EngineError``, which names the package to install."""
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        text = str(error)
        advice = "pip install 'kvconnect[mooncake-cpu]', or 'kvconnect[mooncake]' on a machine with CUDA"
        if "libibverbs" in text:
            advice = "apt-get install libibverbs1"
        elif "cudart" in text:
            advice = "pip install 'kvconnect[mooncake-cpu]' instead of the CUDA build"
        raise EngineError(f"Mooncake is not usable ({error}); {advice}") from error


def built_for_cuda() -> bool:
    """Whether the installed wheel was built with CUDA, by its name: the module does not report it."""
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False
