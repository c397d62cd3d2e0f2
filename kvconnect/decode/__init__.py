"""The parts of a decode node.

`decode_requests`, `pulls` and `sources` run beside the request scheduler, all others in each worker.
"""
