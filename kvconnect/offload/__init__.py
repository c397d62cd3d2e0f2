"""Tiers below the device, with a part on either side."""
