"""``python -m tests.simulator``."""

from __future__ import annotations

from tests.simulator.report import app

if __name__ == "__main__":
    app()
