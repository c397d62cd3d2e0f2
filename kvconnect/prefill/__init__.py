"""A prefill node's parts.

`prefill_requests` beside the request scheduler, all others beside the tensors.
"""
