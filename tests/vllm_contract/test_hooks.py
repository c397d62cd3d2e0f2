"""The connector against what every supported vLLM expects of one, of which a single one is installed.

The expectations are recorded from each release (see ``record.py``). A hook that is new in a vLLM must be
overridden, or be given a line in ``LEFT_TO_BASE``.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm")

from kvconnect.vllm import plugin
from kvconnect.vllm.connector import KVConnect
from kvconnect.vllm.stats import TransferPromMetrics, TransferStats
from tests.vllm_contract.record import RECORDED, describe_class, record

SOURCES = Path(__file__).parents[2] / "kvconnect" / "vllm"
VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))
NEWEST = VERSIONS[-1]

LEFT_TO_BASE: dict[str, str] = {
    "role": "vLLM sets it, and reads it back",
    "bind_connector_metadata": "the base class keeps a step's metadata for its start_load_kv",
    "clear_connector_metadata": "the base class forgets it after the step",
    "has_connector_metadata": "the base class knows",
    "_get_connector_metadata": "the base class hands out what it keeps",
    "set_host_xfer_buffer_ops": "pages are moved from where they lie, not through vLLM's host copies",
    "finish_forward": "loads go to blocks that no forward reads, and are ordered after it was launched",
    "reset_capture_state": "nothing is called, and nothing changes, while CUDA graphs are captured",
    "get_kv_connector_kv_cache_events": "what is kept the scheduler half knows, and tells by take_events",
    "get_mem_pool_context": "both engines register the memory that vLLM allocates",
    "bind_kv_cache_manager": "its block pool is bound by itself, and more of it is not asked",
    "register_finished_partial_tail": "a partly filled last block is fetched like any other, and never kept",
    "get_finished": "only the base's get_transfer_results asks for it, and ours tells failures too",
    "get_finished_count": "every rank reports every request, which is what vLLM assumes",
    "supports_divergent_local_hybrid_hits": "a fetch starts where every group of D's own cache agrees",
    "get_required_kvcache_layout": "any layout is moved as it is",
    "has_pending_block_frees": "when a peer will fetch, nobody here can promise: waiting could last for ever",
    "requires_piecewise_for_cudagraph": "no layer hook is used, so full CUDA graphs stay",
    "get_block_ids_with_load_errors": "failures are reported by request: with several groups blocks end vLLM",
}
"""Hooks that are not overridden, and why what the base class does is right for us."""


@functools.cache
def recorded(version: str) -> dict[str, Any]:
    return json.loads((RECORDED / f"{version}.json").read_text())


def described(cls: type) -> dict[str, dict[str, Any]]:
    """The methods of a class of ours as ``record`` describes vLLM's."""
    return describe_class(cls)["methods"]


def complaints(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Why a call that is right for ``theirs`` would not be right for ``ours``. Both are methods."""
    found = []
    if ours["kind"] != theirs["kind"]:
        found.append(f"is a {ours['kind']}, not a {theirs['kind']}")
    kinds = {kind for _, kind, _ in ours["parameters"]}
    takes_more = "VAR_POSITIONAL" in kinds and "VAR_KEYWORD" in kinds
    by_name = {name: (kind, default) for name, kind, default in ours["parameters"]}
    for place, (name, kind, default) in enumerate(theirs["parameters"]):
        if kind in ("VAR_POSITIONAL", "VAR_KEYWORD"):
            if kind not in kinds:
                found.append(f"takes no {kind}")
        elif kind == "KEYWORD_ONLY":
            if name not in by_name and "VAR_KEYWORD" not in kinds:
                found.append(f"does not take {name}")
        elif place < len(ours["parameters"]) and ours["parameters"][place][0] == name:
            if by_name[name][0] != "POSITIONAL_OR_KEYWORD":
                found.append(f"takes {name} as {by_name[name][0]}")
            if default is not None and by_name[name][1] is None:
                found.append(f"has no default for {name}")
        elif not takes_more:
            found.append(f"does not take {name} in place {place}")
    wanted = {name for name, _, _ in theirs["parameters"]}
    for name, kind, default in ours["parameters"]:
        if name not in wanted and default is None and not kind.startswith("VAR_"):
            found.append(f"wants {name}")
    return found


def vllm_imports(tree: ast.Module) -> list[tuple[str, str]]:
    """What is imported from vLLM when the code runs, as (module, name), unless its absence is caught."""
    found: list[tuple[str, str]] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Try) and any(
            handler.type is not None and "ImportError" in ast.unparse(handler.type)
            for handler in node.handlers
        ):
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found.extend((node.module or "", alias.name) for alias in node.names)
        if isinstance(node, ast.Import):
            found.extend((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(tree)
    return found


each_version = pytest.mark.parametrize("version", VERSIONS)


def base_methods(version: str) -> dict[str, dict]:
    classes = recorded(version)["classes"]
    return {**classes["KVConnectorBase_V1"]["methods"], **classes["SupportsHMA"]["methods"]}


def overridden() -> dict[str, dict]:
    known = set().union(*(base_methods(version) for version in VERSIONS))
    return {name: method for name, method in described(KVConnect).items() if name in known}


def test_the_recorded_versions_are_the_supported_ones():
    minors = [tuple(int(part) for part in version.split(".")[:2]) for version in VERSIONS]
    assert minors == [(0, minor) for minor in range(plugin.OLDEST[1], plugin.NEWEST[1] + 1)]


def test_the_record_is_true():
    found = record()
    assert found["version"] in VERSIONS, "run record.py with this version"
    assert found["classes"] == recorded(found["version"])["classes"]


@each_version
def test_every_abstract_method_is_implemented(version):
    methods = described(KVConnect)
    missing = [
        name for name, base in base_methods(version).items() if base["abstract"] and name not in methods
    ]
    assert not missing


@each_version
def test_every_override_takes_the_calls_of_the_base(version):
    theirs = base_methods(version)
    wrong = {
        name: found
        for name, ours in overridden().items()
        if name in theirs and (found := complaints(ours, theirs[name]))
    }
    assert not wrong


def test_every_hook_is_decided():
    hooks = {name for name in base_methods(NEWEST) if not name.startswith("__")}
    undecided = hooks - set(overridden()) - set(LEFT_TO_BASE)
    assert not undecided, "override these in KVConnect, or say in LEFT_TO_BASE why not"
    both = set(overridden()) & set(LEFT_TO_BASE)
    assert not both, "these are overridden now: take them out of LEFT_TO_BASE"
    assert not set(LEFT_TO_BASE) - hooks, "these are no hooks any more"


def test_an_override_that_a_version_does_not_know_is_harmless_there():
    """It is never called there; it must not reach for the base's, and nothing of ours may call it."""
    assert set(re.findall(r"super\(\)\.(\w+)", inspect.getsource(KVConnect))) == {"__init__"}


def test_no_hook_is_misspelled():
    """A public method that no vLLM knows is never called."""
    own = {name for name in described(KVConnect) if not name.startswith("_")}
    assert not own - set(overridden())


@each_version
def test_what_is_read_of_self_is_ours_or_the_base_s(version):
    base = recorded(version)["classes"]["KVConnectorBase_V1"]
    of_self = [
        found
        for found in ast.walk(ast.parse(inspect.getsource(KVConnect)))
        if isinstance(found, ast.Attribute) and ast.unparse(found.value) in ("self", "cls")
    ]
    known = {*vars(KVConnect), *base["methods"], *base["fields"]}
    known |= {found.attr for found in of_self if isinstance(found.ctx, ast.Store)}
    assert not {found.attr for found in of_self} - known


@each_version
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(TransferStats, "KVConnectorStats"), (TransferPromMetrics, "KVConnectorPromMetrics")],
)
def test_stats_take_the_calls_of_their_base(version, ours, theirs):
    mine, base = described(ours), recorded(version)["classes"][theirs]
    for name, method in base["methods"].items():
        if name in mine:
            assert not complaints(mine[name], method), name
        else:
            # The base's own raises, but for these.
            assert name in ("to_dict",), name


@each_version
def test_what_we_import_of_vllm_is_there(version):
    modules = recorded(version)["modules"]
    for file in sorted(SOURCES.glob("*.py")):
        for module, name in vllm_imports(ast.parse(file.read_text())):
            known = set().union(*(recorded(other)["modules"] for other in VERSIONS))
            inner = f"{module}.{name}"
            if inner in known:
                # A module, imported from its package.
                assert inner in modules, f"{file.name}: {inner} is not in {version}"
                continue
            assert module in known, (
                f"{file.name} imports {module}: add it to MODULES in record.py, and record again"
            )
            assert module in modules, f"{file.name}: {module} is not in {version}"
            assert not name or name in modules[module], f"{file.name}: {inner} is not in {version}"


@each_version
def test_the_configuration_has_the_fields_that_are_read(version):
    fields = recorded(version)["classes"]["KVTransferConfig"]["fields"]
    assert set(plugin.OURS) <= set(fields)


@each_version
def test_transfer_results_have_the_fields_that_are_given(version):
    fields = set(recorded(version)["classes"]["KVConnectorTransferResults"]["fields"])
    calls = [
        found
        for found in ast.walk(ast.parse(inspect.getsource(KVConnect)))
        if isinstance(found, ast.Call) and ast.unparse(found.func).endswith("KVConnectorTransferResults")
    ]
    assert calls
    for call in calls:
        assert not call.args
        assert {keyword.arg for keyword in call.keywords} == fields


@each_version
def test_the_factory_takes_our_registration(version):
    register = recorded(version)["classes"]["KVConnectorFactory"]["methods"]["register_connector"]
    assert [name for name, _, _ in register["parameters"]] == ["cls", "name", "module_path", "class_name"]
