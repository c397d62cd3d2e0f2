"""vLLM's scheduler and both halves of the connector, with a model whose KV is arithmetic.

No weights, no HTTP and no processes: each step is checked byte by byte against ``reference``, which shares no
code with kvconnect. ``python -m tests.vllm_bench --seeds 2000`` runs many; a seed alone is replayed with
``--first-seed S --seeds 1 --trace``.
"""
