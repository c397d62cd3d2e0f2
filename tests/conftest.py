"""Settings of the whole suite."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# The machines that run this are small and noisy: a slow example is no finding.
settings.register_profile("kvconnect", deadline=None, max_examples=100)
settings.load_profile("kvconnect")
torch.set_num_threads(1)

# Without a GPU the kernels' contract runs in Triton's interpreter. It is chosen when a kernel is
# defined, so before anything imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
