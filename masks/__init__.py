"""Masks that `viasd-search` found, as JSON files beside this one. Nothing here imports torch."""

from __future__ import annotations

from importlib import resources

SUFFIX = ".json"


def names() -> list[str]:
    """Names of all masks that come with the package."""
    entries = resources.files(__name__).iterdir()
    return sorted(entry.name.removesuffix(SUFFIX) for entry in entries if entry.name.endswith(SUFFIX))
