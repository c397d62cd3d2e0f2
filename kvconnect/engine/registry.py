"""The registry of engines by name: it lists engines, checks whether they work here, and makes them.

An engine is an entry point of the group ``kvconnect.engines``, in any distribution: a class with the methods
of ``kvconnect.engine.base.Engine`` that takes a host, a protocol, and keyword options. Its ``problem()``,
called on the class, states why it does not work here and what to install. Only ``problem()`` and the
constructor import a library.
"""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from kvconnect.engine.base import Engine
from kvconnect.errors import ConfigError, EngineError, listed
from kvconnect.packages import engine_entry_points, engine_mistakes

log = logging.getLogger("kvconnect.engine")

_OPTIONS = "kv_connector_extra_config.engine_options"
PREFERENCE = ("nixl", "mooncake")
"""``auto`` takes the first of these that works here."""


def create_engine(
    name: str, *, host: str, protocol: str = "auto", options: Mapping[str, Any] | None = None
) -> Engine:
    """Make an engine by its registered name; ``"auto"`` takes NIXL, or Mooncake if NIXL does not work here.

    Raises:
        ConfigError: no engine has this name, or it does not accept an option or its value.
        EngineError: the engine does not work here; the text names the package to install.
    """
    if name == "auto":
        name = _choose()
    engine_class = _load(name)
    problem = engine_class.problem()
    if problem:
        raise EngineError(f"engine {name!r} does not work here: {problem}")
    known = set(inspect.signature(engine_class).parameters) - {"host", "protocol"}
    unknown = sorted(set(options or {}) - known)
    if unknown:
        raise ConfigError(f"{_OPTIONS} has {listed(unknown)}; accepted: {listed(known)}")
    kinds = typing.get_type_hints(engine_class.__init__)
    for option, value in (options or {}).items():
        try:
            if kinds[option] in (bool, int, float, str):
                msgspec.convert(value, kinds[option])
        except msgspec.ValidationError as error:
            raise ConfigError(f"{_OPTIONS}.{option} is {value!r}: {error}") from error
    return cast(Engine, engine_class(host, protocol, **(options or {})))


def available_engines() -> dict[str, str]:
    """Every registered engine by name, with the reason why it does not work here; empty if it works."""
    return {name: _problem(name) for name in engine_entry_points()}


def _load(name: str) -> Any:
    for mistake in engine_mistakes(name, "engine"):
        raise ConfigError(mistake)
    entry = engine_entry_points()[name]
    try:
        return entry.load()
    except Exception as error:
        raise EngineError(f"engine {name!r} ({entry.value}) cannot be loaded: {error!r}") from error


def _problem(name: str) -> str:
    try:
        return str(_load(name).problem())
    except (ConfigError, EngineError) as error:
        return str(error)


def _choose() -> str:
    problems: dict[str, str] = {}
    for name in PREFERENCE:
        problems[name] = _problem(name)
        if not problems[name]:
            break
    skipped = "; ".join(f"{name}: {why}" for name, why in problems.items() if why)
    if all(problems.values()):
        raise EngineError(f"engine auto found none that works here ({skipped})")
    log.info("engine auto uses %r%s", name, f" ({skipped})" if skipped else "")
    return name
