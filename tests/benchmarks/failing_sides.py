"""Sides of a benchmark's pair that fail. In a file of their own, so that a child imports nothing heavy."""

from __future__ import annotations

import os
import time

from benchmarks.transfer.process import Side
from kvconnect.errors import ConfigError


class Failing(Side):
    """A side that fails in every way that a child can."""

    def variables(self, names):
        return [os.environ.get(name) for name in names]

    def die(self):
        os._exit(3)

    def hang(self):
        time.sleep(60)

    def refuse(self):
        raise ConfigError("no such thing")

    def stumble(self):
        return {}["missing"]


class Unmade(Side):
    """A side that cannot be made."""

    def __init__(self):
        raise ConfigError("there is no cache")
