"""Settings of every test: tiny models are faster on one thread, and several test runs on one machine then do not fight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def costs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Pass times of tiny models do not belong into the user's cache, and are measured once a run."""
    from viasd.runtime import costs

    folder = tmp_path_factory.mktemp("costs")
    usual = costs.cache_folder

    def here() -> Path:
        # A test that sets a cache of its own means it.
        import os

        return usual() if "VIASD_CACHE" in os.environ else folder

    costs.cache_folder = here
