"""The modules that prefill and decode share.

The contract with a serving stack, orders and results, and the parts of the transfer thread.
"""
