"""What receiving KV costs a decode that runs, or sending it a prefill.

Two child processes hold a worker each, as in ``bench_transfer``; one of them computes as well: ``model``
and ``attention`` are a decoder of serving size, ``loops`` its steps, ``decode`` those that a CUDA graph
holds. ``side`` is a child, ``pair`` alternates with and without, compares and reports.
"""
