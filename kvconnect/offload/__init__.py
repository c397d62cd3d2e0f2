"""The offload: tiers of KV below device memory, with a scheduler half and a worker half."""
