"""Packing: kernels that gather pages into a slot and scatter them from it, and the memory of slots."""
