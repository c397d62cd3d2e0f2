"""The HTTP router of a prefill/decode pair: small, bounded, and dependency-light.

It speaks the sequential flow with the NIXL-shaped ``kv_transfer_params`` that existing routers speak,
so any of them can take its place. ``pool`` chooses nodes, ``bodies`` says what each leg is sent,
``legs`` talks to a node, ``flow`` runs a request, ``app`` is the HTTP server around it all.
"""
