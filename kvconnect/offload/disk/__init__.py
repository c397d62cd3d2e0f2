"""A tier on disk: rows in append-only segments under a hard bound, found after a crash, and verified."""
