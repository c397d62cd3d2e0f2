"""How fast the KV of requests moves between two workers, beside what the engine alone can do.

Two child processes hold one side each: ``side`` a worker with its cache, ``limit`` an engine with nothing
above it. ``receiver`` orders requests, ``process`` owns the children and their deadlines, ``pair`` drives two
of them through all cases and reports.
"""
