"""The parts of a prefill node.

`prefill_requests` runs beside the request scheduler, all others in each worker.
"""
