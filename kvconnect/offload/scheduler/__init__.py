"""The scheduler half of the offload, beside the request scheduler."""
