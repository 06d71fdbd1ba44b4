"""What `model.generate` was given and does not hand on to a callable `custom_generate`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from transformers import GenerationMixin

_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


class Given(NamedTuple):
    """Arguments of `model.generate`.

    Attributes:
        assistant_model: The drafter, or None.
        streamer: The streamer, or None.
        synced_gpus: Whether several processes generate in step.
        others: Keyword arguments that it does not name itself.
    """

    assistant_model: Any = None
    streamer: Any = None
    synced_gpus: bool | None = None
    others: Mapping[str, Any] = {}


def given_to_generate(model: Any) -> Given:
    """Reads them from the call of `model.generate` that is going on; all empty where there is none.

    transformers (5.0 to 5.24) passes a callable only those keyword arguments that `generate` does not name itself. Its
    `streamer` has then been shown the prompt and would wait for the rest for ever, and its `assistant_model` would be
    ignored without a word, so there is no other way to honour, or even to refuse, them.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("self") is model:
            found = frame.f_locals
            return Given(
                found.get("assistant_model"),
                found.get("streamer"),
                found.get("synced_gpus"),
                found.get("kwargs") or {},
            )
        frame = frame.f_back  # type: ignore[assignment]
    return Given()
