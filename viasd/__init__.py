"""viasd: multi-tier speculative decoding (drafter -> slim verifier -> full verifier)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from viasd.errors import ViasdError
    from viasd.load import load_pair
    from viasd.mask import LayerMask
    from viasd.pair import Pair, make_pair
    from viasd.runtime.api import generate, stream
    from viasd.runtime.engine import Engine
    from viasd.runtime.result import Result

__version__ = "0.1.0"

# The face is resolved on first use: importing a mask file reader does not import a decoding loop.
_FACE = {
    "Engine": "viasd.runtime.engine",
    "LayerMask": "viasd.mask",
    "Pair": "viasd.pair",
    "Result": "viasd.runtime.result",
    "ViasdError": "viasd.errors",
    "generate": "viasd.runtime.api",
    "load_pair": "viasd.load",
    "make_pair": "viasd.pair",
    "stream": "viasd.runtime.api",
}
__all__ = ["Engine", "LayerMask", "Pair", "Result", "ViasdError", "generate", "load_pair", "make_pair", "stream"]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    raise AttributeError(f"module 'viasd' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*globals(), *_FACE])
