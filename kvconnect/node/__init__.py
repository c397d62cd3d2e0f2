"""A small real serving node on torch: models, paged cache, scheduler, HTTP.

It is the default serving stack of the demo, the tests and the benchmarks, and calls a connector as a
production stack would. HTTP runs on the main thread, the engine loop on a thread of its own.
"""
