"""Settings of every test: tiny models are faster on one thread, and several test runs on one machine then do not fight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def costs_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is measured of tiny models does not belong into the user's cache, and is measured once a run."""
    from viasd import remember

    folder = tmp_path_factory.mktemp("costs")
    usual = remember.cache_folder

    def here() -> Path:
        # A test that sets a cache of its own means it.
        import os

        return usual() if "VIASD_CACHE" in os.environ else folder

    remember.cache_folder = here
