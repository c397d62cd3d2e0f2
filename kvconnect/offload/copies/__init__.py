"""The memory of rows, and copies between blocks on a device and rows in host memory."""
