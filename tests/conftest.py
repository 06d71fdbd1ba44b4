"""Settings of every test: tiny models are faster on one thread, and several test runs on one machine then do not fight."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
