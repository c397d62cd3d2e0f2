"""kvconnect moves the KV cache of a request between serving nodes and memory tiers.

The folders follow the data flow, in import order; docs/architecture.md states what each one owns. This module
imports nothing heavy: a serving stack loads it in every one of its processes.
"""

__version__ = "0.3.0"
