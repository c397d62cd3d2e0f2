"""Sides of a benchmark in this process, without children: what they do can be looked at and replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from benchmarks.transfer.process import ChildPair, Side


class Here:
    """A side in this process, asked as a child is."""

    def __init__(self, side):
        self.side = side

    def begin(self, step, *arguments):
        self.value = getattr(self.side, step)(*arguments)

    def answer(self):
        return self.value

    def ask(self, step, *arguments):
        self.begin(step, *arguments)
        return self.answer()


class PairHere(ChildPair):
    """Both sides in this process. ``sides`` are the classes by the names that a pair is asked for with."""

    sides: ClassVar[Mapping[str, type[Side]]]

    def __init__(self, side, environment, timeout_s):
        self.prefill, self.decode = Here(self.sides[side]()), Here(self.sides[side]())

    def __exit__(self, *_):
        for child in (self.decode, self.prefill):
            child.side.close()
