"""The node's HTTP front: who owns its sockets, in the engine's process or in one of its own.

``port`` is the seam: what HTTP asks of an engine. ``local`` is an engine in this process; ``link`` and
``service`` are the two ends of a socket pair between the front's process and the engine's.
"""
