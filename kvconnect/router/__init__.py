"""The HTTP router of a prefill/decode pair.

It uses the sequential flow and the NIXL-shaped ``kv_transfer_params`` of existing routers, so that any of
them can replace it.
"""
