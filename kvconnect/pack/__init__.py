"""Kernels that gather pages into a slot and scatter them, and the memory of slots."""
