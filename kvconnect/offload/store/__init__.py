"""The shared tier: a Mooncake Store."""
