"""kvconnect moves the KV cache of a request between serving nodes and memory tiers.

The folders are the data flow, in the order of imports; docs/architecture.md has what each owns.

This module imports nothing heavy: a serving stack loads it in every one of its processes.
"""

__version__ = "0.2.0"
