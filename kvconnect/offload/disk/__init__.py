"""The disk tier: one file for each row, under a hard bound, verified when read, recovered after a crash."""
