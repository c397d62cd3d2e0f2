"""A decode node's parts.

`decode_requests`, `pulls` and `sources` beside the request scheduler, all others beside the tensors.
"""
