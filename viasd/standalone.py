"""What viasd keeps beside a standalone drafter of its own: the shortlist of words that it may propose."""

from __future__ import annotations

import json
from pathlib import Path

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
    path = Path(ref).expanduser() / RECORD
    try:
        if not path.is_file():
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
        words = torch.tensor([int(word) for word in record["shortlist"]])
    except OSError as error:
        raise DrafterError(f"can't read '{path}': {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DrafterError(
            f"'{path}' must hold a shortlist of token ids, but {error!r}; fit the drafter anew"
        ) from error
    if len(words) < 2 or not bool((words.diff() > 0).all()) or int(words[0]) < 0:
        raise DrafterError(f"the shortlist in '{path}' must be ascending token ids, two or more; fit the drafter anew")
    return words
