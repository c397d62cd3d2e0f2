"""A small real serving node on torch: models, paged cache, scheduler, HTTP.

It serves as the embedded default of the demo, the tests and the benchmarks, and calls a connector as a
production serving stack would. HTTP is read on the main thread, the engine's loop has a thread of its own.
"""
