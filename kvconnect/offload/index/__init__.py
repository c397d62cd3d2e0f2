"""Which contents are in which rows of host memory, and what makes room."""
