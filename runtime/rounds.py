"""Rounds of a strategy until an end is reached, each cut exactly there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from viasd.runtime.drafters import Drafter
from viasd.runtime.passes import Steps, drive
from viasd.runtime.strategies import Emission, Strategy
from viasd.runtime.target import Target
from viasd.sampling import Sampler


@dataclass(frozen=True)
class Ending:
    """Where an answer ends.

    Attributes:
        room: Token limit.
        eos: End-of-sequence tokens.
        keep: Sees a round's emission before it is committed and says how many of its tokens stay (fewer where a stop string
            was completed) and whether the answer ends there; None keeps all.
    """

    room: int
    eos: frozenset[int]
    keep: Callable[[Emission], tuple[int, bool]] | None = None


def round_steps(
    strategy: Strategy,
    target: Target,
    drafter: Drafter | None,
    sampler: Sampler,
    tokens: list[int],
    ending: Ending,
    left: int,
) -> Steps[tuple[Emission, str | None]]:
    """The passes of one round, whose tokens are then committed to `tokens`.

    Args:
        strategy: Decodes.
        target: The sequence's target.
        drafter: The drafter, where there is one.
        sampler: The request's sampler.
        tokens: What has been committed.
        ending: Where the answer ends.
        left: How many more tokens it may have.

    Returns:
        The round's emission cut at the end of the answer, and the reason if this is the last: ``eos``, ``stop`` or
        ``length``.
    """
    emission = yield from strategy.steps(tokens, left)
    emission, reason = cut(emission, left, ending.eos)
    if ending.keep is not None:
        kept, stopped = ending.keep(emission)
        emission = shortened(emission, kept)
        reason = "stop" if stopped else reason
    sampler.commit(tokens, emission.tokens, emission.logits)
    tokens.extend(emission.tokens)
    target.settle(tokens)
    if drafter is not None:
        drafter.settle(tokens)
    return emission, reason


def rounds(
    strategy: Strategy,
    target: Target,
    drafter: Drafter | None,
    sampler: Sampler,
    tokens: list[int],
    ending: Ending,
) -> Iterator[tuple[Emission, str | None]]:
    """Runs a strategy to the end of an answer, alone, committing its tokens to `tokens`.

    Yields:
        What `round_steps` returns.
    """
    left = ending.room
    if drafter is not None:
        drafter.settle(tokens)
    while True:
        emission, reason = drive(round_steps(strategy, target, drafter, sampler, tokens, ending, left))
        left -= len(emission.tokens)
        yield emission, reason
        if reason is not None:
            return


def cut(emission: Emission, room: int, eos: frozenset[int]) -> tuple[Emission, str | None]:
    """Cuts a round's tokens after the first EOS and at the limit; what lies beyond was never emitted."""
    n = min(len(emission.tokens), room)
    reason = "length" if n == room else None
    for i, token in enumerate(emission.tokens[:n]):
        if token in eos:
            n, reason = i + 1, "eos"
            break
    return shortened(emission, n), reason


def shortened(emission: Emission, n: int) -> Emission:
    """The first n tokens of an emission."""
    if n == len(emission.tokens):
        return emission
    return Emission(
        emission.tokens[:n],
        emission.tiers[:n],
        emission.logits[:n],
        emission.drafted[:n],
        min(emission.unseen, n),
    )
