"""A small real serving node on torch: models, paged cache, scheduler, HTTP.

It serves as the embedded default of the demo, the tests and the benchmarks, and calls a connector as a
production serving stack would. ``kvconnect serve`` reads HTTP in a process of its own: see ``front``.
"""
