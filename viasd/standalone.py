"""What viasd keeps beside a standalone drafter of its own: the words that it may propose, and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from viasd.errors import DrafterError

SCHEMA_VERSION = 1
#: Beside the files of transformers' in a drafter's folder.
RECORD = "viasd-drafter.json"


def read_shortlist(ref: str) -> Tensor | None:
    """Token ids ``[m]`` that a drafter model may propose, ascending; None for one that was not made by viasd.

    Args:
        ref: What the drafter was named by; only a folder can have such a list.

    Raises:
        DrafterError: If there is a record and it can't be understood.
    """
    record = read_record(ref)
    if record is None:
        return None
    path = Path(ref).expanduser() / RECORD
    try:
        words = torch.tensor([int(word) for word in record["shortlist"]])
    except (ValueError, KeyError, TypeError) as error:
        raise DrafterError(
            f"'{path}' must hold a shortlist of token ids, but {error!r}; fit the drafter anew"
        ) from error
    if len(words) < 2 or not bool((words.diff() > 0).all()) or int(words[0]) < 0:
        raise DrafterError(f"the shortlist in '{path}' must be ascending token ids, two or more; fit the drafter anew")
    return words


def read_record(ref: str) -> dict[str, Any] | None:
    """What viasd keeps beside a standalone drafter of its own, None for another.

    Args:
        ref: What the drafter was named by; only a folder can have such a record.

    Raises:
        DrafterError: If there is a record and it can't be read.
    """
    path = Path(ref).expanduser() / RECORD
    try:
        if not path.is_file():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DrafterError(f"can't read '{path}': {error.strerror or error}") from error
    except ValueError as error:
        raise DrafterError(
            f"'{path}' must be a record of viasd-fit drafter, but {error!r}; fit the drafter anew"
        ) from error
    if not isinstance(record, dict):
        raise DrafterError(f"'{path}' must hold a shortlist of token ids, but it is no object; fit the drafter anew")
    return record
