"""The time to the first token of a prompt that comes back: computed again, or found where its blocks are.

One node computes with a decoder of serving size. ``model`` is that decoder, ``node`` a running node and its
requests, ``runner`` the order of things and the report.
"""
