"""What prefill and decode share.

The contract with a serving stack, orders and results, and the one thread that owns the engine.
"""
