"""The HTTP router of a prefill/decode pair: small, bounded, and dependency-light.

It speaks the sequential flow with the NIXL-shaped ``kv_transfer_params`` that existing routers speak,
so any of them can take its place. ``pool`` chooses nodes, ``bodies`` makes what each is sent, ``upstream``
talks to them, ``flow`` runs a request, ``app`` is the HTTP server around it all.
"""
