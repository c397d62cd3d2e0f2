"""Faults, injected into real processes: a pair is killed, stopped, cut off and attacked while it serves.

Everything is seen from outside: over HTTP, by signals and by the operating system's accounts. ``nursery`` and
``stage`` own the processes, ``load`` asks them and judges every answer; ``kills``, ``stops``, ``links``,
``hostile`` and ``soak`` each inject one kind of fault and return a report that lists what was wrong.
"""
