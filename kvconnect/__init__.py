"""kvconnect moves the KV cache of a request between serving nodes and memory tiers.

The folders are the data flow, and their order is the import order:

``cache``      what bytes exist: specs, region table, shards, retention
``runner_kit`` kernel block sizes, block tables, zeroing, flex-attention capacity
``plan``       pure: which bytes go where
``pack``       kernels that move pages into a contiguous slot and out of one
``engine``     one narrow seam over the transfer libraries; the only place that imports them
``peer``       two sides talking: messages, session, the encrypted ZeroMQ channel and its keys
``scheduler``  the half that lives with the request scheduler
``worker``     the half that lives with the tensors: leases, loads, slots
``offload``    tiers below the device's memory: index, copies, disk, store, and their two halves
``vllm``       the connector class that vLLM loads, and everything that knows a vLLM type
``node``       a small real serving node, used by the demo, the tests and the benchmarks
``router``     the HTTP router of a prefill/decode pair
``explain``    what two configurations would exchange, and by which path
``testing``    the contract suite of engines, for those of others too
``demo``       the proof that an installed kvconnect works here
``cli``        the command line, a file per command

This module imports nothing heavy: a serving stack loads it in every one of its processes.
"""

__version__ = "0.2.0"
