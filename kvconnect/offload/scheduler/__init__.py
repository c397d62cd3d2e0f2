"""The half of the offload that lives with the request scheduler."""
