"""Settings of the whole suite."""

from __future__ import annotations

import torch
from hypothesis import settings

# The machines that run this are small and noisy: a slow example is no finding.
settings.register_profile("kvconnect", deadline=None, max_examples=100)
settings.load_profile("kvconnect")
torch.set_num_threads(1)
