"""Feature drafters that `viasd-fit drafter` made, as safetensors files beside this one. Nothing here imports torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

SUFFIX = ".tiny.safetensors"


def names() -> list[str]:
    """Targets that a drafter comes with the package for, as ``FAMILY:SIZE``."""
    entries = (entry.name for entry in resources.files(__name__).iterdir())
    return sorted(name.removesuffix(SUFFIX).replace("-", ":", 1) for name in entries if name.endswith(SUFFIX))


def file_of(target: str) -> Path:
    """The file for one of these targets; the package is installed as files, so it has a path."""
    return Path(str(resources.files(__name__) / f"{target.replace(':', '-', 1)}{SUFFIX}"))
