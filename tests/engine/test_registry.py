"""Engines by name: what is available, what auto picks, and what the errors advise."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from kvconnect.engine import registry
from kvconnect.errors import ConfigError, EngineError


def test_memory_is_always_usable() -> None:
    assert registry.available_engines()["memory"] == ""
    engine = registry.create_engine("memory", host="127.0.0.1", options={"max_copies": 7})
    try:
        assert engine.capabilities.name == "memory"
        assert engine.capabilities.max_copies == 7
    finally:
        engine.close()


def test_unknown_names_and_options_say_what_is_known() -> None:
    with pytest.raises(ConfigError, match="nixl, mooncake, memory or auto"):
        registry.create_engine("carrier-pigeon", host="127.0.0.1")
    with pytest.raises(ConfigError, match="max_copies"):
        registry.create_engine("memory", host="127.0.0.1", options={"max_copy": 1})
    with pytest.raises(ConfigError, match="tcp"):
        registry.create_engine("memory", host="127.0.0.1", protocol="rdma")


def test_an_address_that_is_not_ours_is_an_engine_error() -> None:
    with pytest.raises(EngineError, match=r"192\.0\.2\.1"):
        registry.create_engine("memory", host="192.0.2.1")


def test_auto_takes_the_first_that_works_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []
    monkeypatch.setattr(
        registry,
        "_MAKERS",
        {name: lambda *_, name=name: made.append(name) for name in ("nixl", "mooncake", "memory")},
    )
    for broken, expected in (
        ((), "nixl"),
        (("nixl",), "mooncake"),
        (("nixl", "mooncake"), "memory"),
    ):
        problems = {
            name: (lambda text=f"no {name} here" if name in broken else "": text)
            for name in ("nixl", "mooncake", "memory")
        }
        monkeypatch.setattr(registry, "_PROBLEM", problems)
        caplog.clear()
        with caplog.at_level(logging.INFO, "kvconnect.engine"):
            registry.create_engine("auto", host="127.0.0.1")
        assert made.pop() == expected
        assert expected in caplog.text
        assert [record.levelname for record in caplog.records] == [
            "WARNING" if expected == "memory" else "INFO"
        ]


@pytest.mark.parametrize(
    ("engine", "module", "advice"),
    [("mooncake", "mooncake", "kvconnect[mooncake-cpu]"), ("nixl", "nixl", "kvconnect[nixl]")],
)
def test_a_missing_library_is_an_error_with_advice(
    monkeypatch: pytest.MonkeyPatch, engine: str, module: str, advice: str
) -> None:
    monkeypatch.setattr(
        registry, "_installed", lambda name, real=registry._installed: name != module and real(name)
    )
    assert advice in registry.available_engines()[engine]
    with pytest.raises(EngineError) as caught:
        registry.create_engine(engine, host="127.0.0.1")
    assert advice in str(caught.value)


def test_importing_the_registry_loads_no_library() -> None:
    code = (
        "import sys, kvconnect.engine.registry, kvconnect.engine.mooncake, kvconnect.engine.nixl;"
        "sys.exit(any(name.split('.')[0] in ('nixl', 'mooncake') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
