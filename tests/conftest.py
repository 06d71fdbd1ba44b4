"""Settings of the whole test run."""

from __future__ import annotations

import pytest
import torch
from tiny import pair_of

from viasd.pair import Pair


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Tiny tensors: threads only wait for each other, and results should not depend on the machine's core count.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lookup_pair() -> Pair:
    """A tiny Llama with prompt lookup."""
    return pair_of("llama")
