"""Engines by name: what is registered, what auto picks, and what the errors advise."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvconnect.config import parse_kv_transfer_config
from kvconnect.engine import registry
from kvconnect.engine.memory import MemoryEngine
from kvconnect.errors import ConfigError, EngineError
from kvconnect.node.pair_demo import PROTOCOLS


def with_distribution(folder: Path, engines: dict[str, str]) -> str:
    """A folder for ``sys.path`` in which a distribution registers engines by name."""
    info = folder / "parcel-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parcel\nVersion: 1.0\n")
    rows = "".join(f"{name} = {value}\n" for name, value in engines.items())
    (info / "entry_points.txt").write_text(f"[kvconnect.engines]\n{rows}")
    return str(folder)


def test_an_engine_of_another_distribution_is_configured_by_its_name(tmp_path, monkeypatch) -> None:
    """One that a package of its own brings moves bytes in test_sample_package."""
    engines = {"parcel": "kvconnect.engine.memory:MemoryEngine"}
    monkeypatch.syspath_prepend(with_distribution(tmp_path / "site", engines))
    config = parse_kv_transfer_config(
        {"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "parcel"}}
    )
    assert config.extra.engine == "parcel"
    assert registry.available_engines()["parcel"] == ""
    with pytest.raises(ConfigError, match="auto, memory, mooncake, nixl, none, parcel"):
        registry.create_engine("parcle", host="127.0.0.1")
    engine = registry.create_engine("parcel", host="127.0.0.1")
    assert isinstance(engine, MemoryEngine)
    engine.close()


def test_an_engine_that_cannot_be_loaded_says_why_and_harms_no_other(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(with_distribution(tmp_path / "site", {"lost": "no_such_module:Engine"}))
    found = registry.available_engines()
    assert "no_such_module" in found["lost"]
    assert found["memory"] == ""
    with pytest.raises(EngineError, match=r"'lost' \(no_such_module:Engine\) cannot be loaded"):
        registry.create_engine("lost", host="127.0.0.1")


def test_without_metadata_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.packages.engine_entry_points", dict)
    monkeypatch.setattr(registry, "engine_entry_points", dict)
    with pytest.raises(ConfigError, match="those of kvconnect are missing: install it with pip"):
        parse_kv_transfer_config({"kv_role": "kv_both", "kv_connector_extra_config": {"engine": "nixl"}})
    with pytest.raises(EngineError, match="those of kvconnect are missing: install it with pip"):
        registry.create_engine("auto", host="127.0.0.1")


def test_options_reach_the_engine() -> None:
    assert registry.available_engines()["memory"] == ""
    engine = registry.create_engine("memory", host="127.0.0.1", options={"max_bytes": 7})
    assert (engine.capabilities.name, engine.capabilities.max_bytes) == ("memory", 7)
    engine.close()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("carrier-pigeon", {}, "accepted: auto, memory, mooncake, nixl"),
        ("memory", {"max_byte": 1}, "max_byte.*accepted: .*max_bytes"),
        *(("memory", {"max_bytes": value}, r"max_bytes is .*: Expected `int`") for value in ("5", 5.5, None)),
    ],
)
def test_what_is_not_known_or_of_another_type_is_named(name, options, text) -> None:
    with pytest.raises(ConfigError, match=text):
        registry.create_engine(name, host="127.0.0.1", options=options)


def test_auto_takes_the_first_that_works_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken: set[str] = set()

    class Double:
        def __init__(self, name: str) -> None:
            self.name = name

        def problem(self) -> str:
            return f"no {self.name} here" if self.name in broken else ""

        def __call__(self, host: str, protocol: str) -> str:
            return self.name

    monkeypatch.setattr(registry, "_load", Double)
    for expected in ("nixl", "mooncake"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvconnect.engine"):
            assert registry.create_engine("auto", host="127.0.0.1") == expected
        assert f"auto uses '{expected}'" in caplog.text
        broken.add(expected)
    with pytest.raises(EngineError, match="nixl: no nixl here; mooncake: no mooncake here"):
        registry.create_engine("auto", host="127.0.0.1")


@pytest.mark.parametrize(
    ("engine", "module", "advice"),
    [("mooncake", "mooncake.engine", "kvconnect[mooncake-cpu]"), ("nixl", "nixl._api", "kvconnect[nixl]")],
)
def test_a_missing_library_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, engine: str, module: str, advice: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert advice in registry.available_engines()[engine]
    with pytest.raises(EngineError) as caught:
        registry.create_engine(engine, host="127.0.0.1")
    assert advice in str(caught.value)


@pytest.mark.parametrize(("engine", "protocol"), PROTOCOLS.items())
def test_an_engine_is_bypassed_only_where_no_protocol_is_named(engine: str, protocol: str) -> None:
    if problem := registry.available_engines()[engine]:
        pytest.skip(problem)
    for asked, may_be in (("auto", True), (protocol, False)):
        made = registry.create_engine(engine, host="127.0.0.1", protocol=asked)
        assert made.capabilities.may_be_bypassed == may_be
        made.close()


def test_importing_the_registry_loads_no_library() -> None:
    code = (
        "import sys, kvconnect.engine.registry, kvconnect.engine.mooncake, kvconnect.engine.nixl;"
        "sys.exit(any(name.split('.')[0] in ('nixl', 'mooncake') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
