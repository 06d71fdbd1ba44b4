"""The Python face: `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.config import GenerationConfig
from viasd.runtime.guard import Guard
from viasd.runtime.names import EXITING
from viasd.runtime.requests import check_prompt_kind, make_config, resolved, settled_config
from viasd.runtime.result import Result
from viasd.runtime.session import Event, Session


class Stream:
    """An answer as it is made: iterate over its events, then read `result`.

    Stopping early (leaving the loop, Ctrl-C) keeps what was made: `result` then has ``finish_reason="interrupted"``.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._events = iter(session)

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        return next(self._events)

    def close(self) -> None:
        """Ends the answer here."""
        self._events.close()  # type: ignore[attr-defined]

    @property
    def result(self) -> Result:
        """The answer. Ends the stream if it is still going on."""
        if self.session.result is None:
            self.close()
        if self.session.result is None:
            # Nothing was asked of the stream yet, so its generator never started: make the answer now.
            for _ in self.session:
                pass
        assert self.session.result is not None
        return self.session.result


def stream(
    pair: Pair,
    prompt: Prompt,
    *,
    mask: LayerMask | str | None = "auto",
    heads: LightHeads | str | None = "auto",
    guard: Guard | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Stream:
    """Starts an answer and yields it piece by piece.

    Args:
        pair: See `load_pair`.
        prompt: Text, chat messages, or token ids.
        mask: A `LayerMask`, what ``--mask`` takes, or None.
        heads: Light heads (strategy adadecode, masks ``prefix:E``), what ``--heads`` takes, or None. ``auto`` is looked for
            only where heads are needed.
        guard: A guard that goes on learning over several answers; None makes a fresh one for each.
        config: A ready configuration, instead of `options`.
        **options: Fields of `GenerationConfig`, `SamplingConfig` and `DecodingConfig`, such as ``max_new_tokens=64``.

    Returns:
        An iterator of `Event` ``(text, token_ids, tier, stats)`` with the `Result` at its end.

    Raises:
        ViasdError: If anything about the request can't be done; before the first token.
    """
    config = settled_config(config, options)
    decoding = config.decoding
    if decoding.unmasked and mask not in (None, "auto", "none"):
        raise OptionError(
            "a mask is for a slim verifier, which this strategy does not have; leave out the mask, or use strategy cascade"
        )
    mask, heads = resolved(pair, mask, heads, exiting=decoding.strategy in EXITING)
    chat = check_prompt_kind(prompt)
    return Stream(Session(pair, pair.encode(prompt), config, mask=mask, heads=heads, guard=guard, chat=chat))


def generate(
    pair: Pair,
    prompt: Prompt,
    *,
    mask: LayerMask | str | None = "auto",
    heads: LightHeads | str | None = "auto",
    guard: Guard | None = None,
    config: GenerationConfig | None = None,
    **options: Any,
) -> Result:
    """Makes a whole answer. Arguments as for `stream`.

    Raises:
        ViasdError: If anything about the request can't be done; before the first token.
    """
    answer = stream(pair, prompt, mask=mask, heads=heads, guard=guard, config=config, **options)
    for _ in answer:
        pass
    return answer.result


__all__ = ["Stream", "generate", "make_config", "stream"]
