"""The HTTP router of a prefill/decode pair.

It speaks the sequential flow with the NIXL-shaped ``kv_transfer_params`` that existing routers speak, so any
of them can take its place.
"""
