"""Rows of host memory, and blocks on their way between them and a device."""
