"""The double keeps the contract that it stands in for."""

from __future__ import annotations

from tests.offload.memory_tier import MemoryTier
from tests.offload.tier_suite import LowerTierSuite


class TestMemoryTier(LowerTierSuite):
    def make_tier(self, tmp_path):
        return MemoryTier(64 << 20, max_queued_bytes=self.queue_bytes)


class TestMemoryTierThatMustBeAsked(LowerTierSuite):
    def make_tier(self, tmp_path):
        return MemoryTier(64 << 20, max_queued_bytes=self.queue_bytes, indexed=False)
