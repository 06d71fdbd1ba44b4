"""Many prompts, one answer each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from viasd.errors import ViasdError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.config import GenerationConfig
from viasd.runtime.engine.engine import CONCURRENCY, Engine
from viasd.runtime.result import Result


def answer_all(
    pair: Pair,
    prompts: Sequence[Prompt],
    config: GenerationConfig,
    *,
    mask: LayerMask | str | None,
    heads: LightHeads | str | None,
    concurrency: int | None,
) -> list[Result]:
    """Answers prompts together; each gets copies of the request's processors.

    Raises:
        ViasdError: If one of the requests can't be done, which is named; before the first token.
    """
    engine = Engine(pair, mask=mask, heads=heads, concurrency=CONCURRENCY if concurrency is None else concurrency)
    numbers = []
    for index, prompt in enumerate(prompts):
        try:
            own = replace(config, processors=[copy.deepcopy(p) for p in config.processors])
            numbers.append(engine.add(prompt, config=own))
        except ViasdError as error:
            raise type(error)(f"prompt {index} of {len(prompts)}: {error}") from error
    for _ in engine.stream():
        pass
    return [engine.results[number] for number in numbers]
