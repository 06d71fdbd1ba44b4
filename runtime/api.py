"""The Python face: `generate` and `stream`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.config import DecodingConfig, GenerationConfig
from viasd.runtime.guard import Guard
from viasd.runtime.names import EXITING, MASKED
from viasd.runtime.result import Result
from viasd.runtime.session import Event, Session, check_prompt_kind
from viasd.sampling import SamplingConfig
from viasd.shipped import resolve_heads, resolve_mask

_SAMPLING = {f.name for f in fields(SamplingConfig)}
_DECODING = {f.name for f in fields(DecodingConfig)}
_OWN = {f.name for f in fields(GenerationConfig)} - {"sampling", "decoding"}


def make_config(options: Mapping[str, Any]) -> GenerationConfig:
    """One flat set of options -> a checked configuration.

    Args:
        options: Names of the fields of `GenerationConfig`, `SamplingConfig` and `DecodingConfig`.

    Raises:
        OptionError: If a name is unknown, a value out of range, or two options contradict each other.
    """
    unknown = sorted(set(options) - _SAMPLING - _DECODING - _OWN)
    if unknown:
        raise OptionError(f"unknown option '{unknown[0]}'; known are {', '.join(sorted(_SAMPLING | _DECODING | _OWN))}")
    stop = options.get("stop", ())
    own = {k: v for k, v in options.items() if k in _OWN}
    own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return GenerationConfig(
        sampling=SamplingConfig(**{k: v for k, v in options.items() if k in _SAMPLING}),
        decoding=DecodingConfig(**{k: v for k, v in options.items() if k in _DECODING}),
        **own,
    )


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
    if config is not None and options:
        raise OptionError(f"give either config or single options, but got both (option '{next(iter(options))}')")
    config = config or make_config(options)
    decoding = config.decoding
    unmasked = decoding.strategy not in MASKED or (decoding.tiers == "2" and decoding.strategy in ("auto", "cascade"))
    if unmasked and mask not in (None, "auto", "none"):
        raise OptionError(
            "a mask is for a slim verifier, which this strategy does not have; leave out the mask, or use strategy cascade"
        )
    if isinstance(mask, str):
        mask = resolve_mask(mask, pair.target.n_layers, pair.name)
    if heads == "auto":
        # A mask file may name its own.
        needed = decoding.strategy in EXITING or (mask is not None and mask.prefix is not None and mask.heads is None)
        heads = resolve_heads("auto", pair.name) if needed else None
    elif isinstance(heads, str):
        heads = resolve_heads(heads, pair.name)
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
