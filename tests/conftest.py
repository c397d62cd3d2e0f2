"""Settings of the whole suite."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy
import pytest
import torch
from hypothesis import settings

from tests.nursery import nodes_forked

# The machines that run this are small and noisy: a slow example is no finding.
settings.register_profile("kvconnect", deadline=None, max_examples=100)
settings.load_profile("kvconnect")
torch.set_num_threads(1)
# What takes most of the time in which a half is made, and is always the same: what is installed, and which
# fields settings have.
importlib.metadata.version = functools.cache(importlib.metadata.version)
msgspec.structs.fields = functools.cache(msgspec.structs.fields)

# Without a GPU the kernels' contract runs in Triton's interpreter. It is chosen when a kernel is
# defined, so before anything imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter

        @functools.cache
        def builtins_of(module):
            members = inspect.getmembers(module)
            return [name for name, member in members if interpreter.tl.core.is_builtin(member)]

        def patch_builtins(module, builder, scope):
            for name in builtins_of(module):
                if interpreter.tl.core.is_builtin(member := getattr(module, name)):
                    interpreter._patch_attr(module, name, member, builder, scope)

        # The interpreter's own looks through all of Triton's language for each call of each function, which
        # is a third of its time.
        interpreter._patch_builtin = patch_builtins

        # Each addition is computed twice to see whether it overflows, and what was seen is then dropped: only
        # where kernels are debugged is it asserted.
        options = interpreter.interpreter_builder.options
        sanitized = options.sanitize_overflow and options.debug
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=sanitized)

        # Each call makes a table of all types.
        dtype_of, address = functools.cache(interpreter._get_np_dtype), numpy.dtype(numpy.uint64)
        interpreter._get_np_dtype = lambda kind: address if kind.scalar.is_ptr() else dtype_of(kind.scalar)

        # A launch replaces Triton's language for its time, and its place in the grid is the process's: of two
        # threads at once one would lose both.
        launch, launches = interpreter.GridExecutor.__call__, threading.RLock()

        def launch_alone(*arguments, **named):
            with launches:
                return launch(*arguments, **named)

        interpreter.GridExecutor.__call__ = launch_alone


@pytest.fixture(scope="session", autouse=True)
def forked_nodes() -> Iterator[None]:
    with nodes_forked():
        yield


_LONGEST = (
    "offload/test_node_sessions.py",
    "pack/test_packer.py",
    "offload/test_node.py",
    "offload/test_node_soak.py",
    "benchmarks/test_command.py",
    "faults/test_kills.py",
    "simulator/test_planted.py",
    "simulator/test_seeds.py",
    "test_cli.py",
    "faults/test_rails.py",
    "engine/test_mooncake.py",
    "engine/test_nixl.py",
    "test_pair.py",
    "faults/test_hostile.py",
    "faults/test_stops.py",
    "test_wheel.py",
    "pack/test_casts.py",
    "offload/test_store_tier.py",
    "test_pair_parallel.py",
    "deploy/test_files.py",
    "engine/test_sample_package.py",
    "deploy/test_commands.py",
    "faults/test_links.py",
    "test_any_to_any.py",
    "test_pair_transport.py",
    "node/test_disk_pulls.py",
    "offload/test_node_servers.py",
    "engine/test_registry.py",
    "benchmarks/test_figures.py",
)
"""The files that take longest begin first, so that none of them ends long after all others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    ranks = {os.path.join(here, *name.split("/")): rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: ranks.get(str(item.path), len(ranks)))
