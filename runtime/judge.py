"""One verifier's judgement of a block, at any temperature: the step that strategies share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from viasd.accept import Verdict, verify, verify_greedy
from viasd.draws import Draws
from viasd.rows import Rows
from viasd.sampling import Ahead, Sampler


def judge_block(
    logits: Tensor,
    tokens: Sequence[int],
    laws: Rows,
    sampler: Sampler,
    ahead: Ahead,
    draws: Draws,
    alpha: float = 0.0,
) -> tuple[Verdict, Rows]:
    """Tests a proposed block against a verifier's raw logits.

    Args:
        logits: Raw logits ``[n + 1, V]`` at the block's positions and after it.
        tokens: The n proposed tokens.
        laws: The n laws they were drawn from.
        sampler: The request's sampler.
        ahead: The request's processors at the prefix before the block.
        draws: Source of randomness.
        alpha: Lossy acceptance; 0 is exact.

    Returns:
        The verdict, and the verifier's own laws at the n + 1 positions.
    """
    processed = ahead.block(logits, tokens)
    if sampler.greedy:
        verdict = verify_greedy(tokens, processed, alpha)
        # The law of a greedy verifier's outcome is a point mass at the outcome itself.
        outcome = [*tokens[: verdict.accepted], verdict.token]
        return verdict, Rows.one_hot(outcome)
    rows = sampler.law(processed)
    return verify(tokens, laws, rows, draws, alpha), rows
