"""How fast kvconnect is, part by part: ``python -m benchmarks NAME``."""
