"""Reading a safetensors file that says of itself what it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from viasd.errors import ViasdError


def read_artefact(
    path: str | Path, key: str, what: str, kind: str, error: type[ViasdError]
) -> tuple[Any, dict[str, Tensor]]:
    """What a file says of itself, and its tensors.

    Args:
        path: The file.
        key: Of the entry in its metadata that says it, as JSON.
        what: What it is called in messages, such as ``heads file``.
        kind: What it should be, such as ``file of light heads``.
        error: What to raise.

    Returns:
        The entry, None where there is none, and tensors by name.

    Raises:
        ViasdError: Of the class `error`, if it can't be read or is no such file.
    """
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(key, "null"))
            return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as failure:
        raise error(f"can't read {what} '{path}': {failure.strerror or failure}") from failure
    except (SafetensorError, ValueError, RecursionError) as failure:
        raise error(f"'{path}' is no {kind}: {failure}") from failure
