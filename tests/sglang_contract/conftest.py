from __future__ import annotations

import os
import sys

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """SGLang reads this when it is imported; its native modules are stood in for, as for servers."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from tests.sglang.stand_ins import sitecustomize

    sys.path.append(os.path.dirname(sitecustomize.__file__))
