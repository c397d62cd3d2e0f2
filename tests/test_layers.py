"""The tree is the map: who may import whom."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent / "kvconnect"
BASE = {
    *("errors", "addresses", "reading", "config", "metrics"),
    *("packages", "timeline", "outcome", "receipt"),
}
# A folder imports only from those before it.
ORDER = [
    "cache", "plan", "pack", "runner_kit", "engine", "peer", "transfer", "prefill", "decode", "offload",
    "halves", "sglang", "vllm", "router", "node", "tools", "cli",
]  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))

PURE = ("session.py", "leases.py", "loads.py", "orders.py")
NATIVE = {
    "mooncake": "engine",
    "nixl": "engine",
    "vllm": "vllm",
    "sglang": "sglang",
    "opentelemetry": "vllm",
    "zmq": ("peer", "router"),
    "aiohttp": ("node", "router"),
}


@functools.cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def folder(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def allowed(path: Path) -> set[str]:
    """The folders and modules of the package that a file may import from."""
    ours = folder(path)
    if ours in BASE:
        return BASE
    if ours == "router":
        # A router knows no tensors, engines or blocks; both serve HTTP.
        return {*BASE, "router", "node"}
    assert ours in ORDER, f"{ours} has no place in the order of folders"
    return {*BASE, *ORDER[: ORDER.index(ours) + 1]}


def test_a_folder_imports_only_from_those_above_it():
    known = {path.name if path.is_dir() else path.stem for path in ROOT.iterdir()}
    for path in FILES:
        if folder(path) not in ("__init__", "__main__"):
            theirs = {name.split(".")[1] for name in imports(path) if name.startswith("kvconnect.")}
            assert theirs & known <= allowed(path), path


def test_of_the_node_a_router_imports_its_http_server_alone():
    for path in FILES:
        if folder(path) == "router":
            of_node = {name for name in imports(path) if name.startswith("kvconnect.node.")}
            assert all(name.startswith("kvconnect.node.http_server") for name in of_node), (path, of_node)


def test_nothing_in_the_package_imports_its_command_line_or_its_proof():
    for path in FILES:
        if folder(path) not in ("cli", "__main__"):
            assert not any(name.startswith("kvconnect.cli") for name in imports(path)), path
        assert not {name.split(".")[0] for name in imports(path)} & {"benchmarks", "tests"}, path


def test_libraries_stay_behind_their_seam():
    for path in FILES:
        for name in {imported.split(".")[0] for imported in imports(path)} & NATIVE.keys():
            home = NATIVE[name]
            assert folder(path) in ((home,) if isinstance(home, str) else home), f"{name} in {path}"


def test_orders_and_plan_know_no_socket_thread_or_clock():
    for path in FILES:
        if folder(path) == "plan" or path.name in PURE:
            assert not imports(path) & {"threading", "socket", "time", "zmq", "asyncio"}, path


def test_the_package_itself_imports_nothing_heavy():
    assert imports(ROOT / "__init__.py") == set()
