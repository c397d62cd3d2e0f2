"""Operators' tools: ``doctor`` predicts what will work, ``inspect`` shows the state of running workers."""
