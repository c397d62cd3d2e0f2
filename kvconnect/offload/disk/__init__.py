"""A tier on disk: a file for each row under a hard bound, found after a crash, and verified."""
