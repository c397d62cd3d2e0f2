"""Sides of a benchmark's pair that fail, and sides in this process. Nothing heavy: a child imports it."""

from __future__ import annotations

import os
import time
from importlib import import_module

from benchmarks.process import ChildPair, Side
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


class Here:
    """A side in this process, asked as a child is."""

    def __init__(self, side):
        module, _, name = side.partition(":")
        self.side = getattr(import_module(module), name)()

    def begin(self, step, *arguments):
        self.value = getattr(self.side, step)(*arguments)

    def answer(self):
        return self.value

    def ask(self, step, *arguments):
        self.begin(step, *arguments)
        return self.answer()


class PairHere(ChildPair):
    """Both sides in this process: what they do can be looked at and replaced."""

    def __init__(self, side, environment, timeout_s):
        self.prefill, self.decode = Here(side), Here(side)

    def __exit__(self, *_):
        for child in (self.decode, self.prefill):
            child.side.ends.close()
