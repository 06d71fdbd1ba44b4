"""The Python face: `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, overload

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.config import GenerationConfig
from viasd.runtime.engine.many import answer_all
from viasd.runtime.guard import Guard
from viasd.runtime.names import EXITING
from viasd.runtime.requests import check_prompt_kind, make_config, resolved, settled_config, several
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
    _check_mask_use(config, mask)
    mask, heads = resolved(pair, mask, heads, exiting=config.decoding.strategy in EXITING)
    chat = check_prompt_kind(prompt)
    return Stream(Session(pair, pair.encode(prompt), config, mask=mask, heads=heads, guard=guard, chat=chat))


@overload
def generate(pair: Pair, prompt: str, **options: Any) -> Result: ...


@overload
def generate(pair: Pair, prompt: list[str] | list[list[dict[str, str]]], **options: Any) -> list[Result]: ...


@overload
def generate(pair: Pair, prompt: Prompt, **options: Any) -> Result: ...


def generate(
    pair: Pair,
    prompt: Prompt,
    *,
    mask: LayerMask | str | None = "auto",
    heads: LightHeads | str | None = "auto",
    guard: Guard | None = None,
    config: GenerationConfig | None = None,
    concurrency: int | None = None,
    **options: Any,
) -> Result | list[Result]:
    """Makes a whole answer, or one for each of several prompts, which are then decoded together. Arguments as for `stream`.

    Args:
        pair: See `load_pair`.
        prompt: Text, chat messages, or token ids; or a list of them (of texts, of chats, of lists of ids).
        mask: See `stream`.
        heads: See `stream`.
        guard: See `stream`; of a single prompt alone.
        config: See `stream`.
        concurrency: Of several prompts: most answers at once.
        **options: See `stream`. With several prompts each gets copies of the logits processors, and the same seed.

    Returns:
        The result, or a list of results in the order of the prompts. One of several that fails on the way ends with
        ``finish_reason="error"`` and spoils no other.

    Raises:
        ViasdError: If anything about a request can't be done; before the first token. Of several it says which.
    """
    prompts = several(prompt)
    if prompts is not None:
        if guard is not None:
            raise OptionError("a guard learns from one answer after the other, so it is for one prompt at a time")
        config = settled_config(config, options)
        _check_mask_use(config, mask)
        return answer_all(pair, prompts, config, mask=mask, heads=heads, concurrency=concurrency)
    if concurrency is not None:
        raise OptionError("concurrency is for several prompts, but there is one; give a list, or leave it out")
    answer = stream(pair, prompt, mask=mask, heads=heads, guard=guard, config=config, **options)
    for _ in answer:
        pass
    return answer.result


def _check_mask_use(config: GenerationConfig, mask: LayerMask | str | None) -> None:
    if config.decoding.unmasked and mask not in (None, "auto", "none"):
        raise OptionError(
            "a mask is for a slim verifier, which this strategy does not have; leave out the mask, or use strategy cascade"
        )


__all__ = ["Stream", "generate", "make_config", "stream"]
