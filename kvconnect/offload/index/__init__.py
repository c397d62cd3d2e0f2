"""The index of host memory: which row holds which content, eviction, budgets and session pins."""
