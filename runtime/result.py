"""What a generation gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from viasd.confident import ConfidentConfig
from viasd.runtime.metrics import Counters
from viasd.runtime.readouts import Readouts


@dataclass(frozen=True)
class Result:
    """An answer and how it came about.

    Attributes:
        text: The answer's text, special tokens left out; ends before a stop string.
        token_ids: The answer's tokens; the one that completes a stop string and an EOS are the last.
        prompt_tokens: Length of the prompt.
        finish_reason: ``eos``, ``stop``, ``length``, ``interrupted`` where the caller ended it early, or ``error`` (an
            `Engine` records what went wrong in one of its requests and goes on with the others).
        strategy: Strategy that ran.
        mode: Mode that ran.
        lossless: Whether the output's law is exactly the target's.
        tiers: Tier of each token: ``drafter``, ``slim`` or ``full``.
        stats: Counts and seconds.
        seed: The seed used.
        pair: Name of the pair.
        mask: Name of the slim verifier's mask, or None.
        dtype: Data type of the target.
        device: Device of the target.
        notes: What a person should know: choices made for them, and how far a lossy output can be trusted.
        heads: Name of the light heads, or None.
        error: What ended it, where `finish_reason` is ``error``.
        loss: How far the output can differ from the target's own, in one sentence; the last note of a lossy output.
        readouts: The tiers' readouts: with one of the full verifier, that is the target of `lossless`.
        selected_layers: For each token the layer after which its row was read out by such a readout: the full verifier's, or
            else the slim verifier's. None for a token that this tier did not judge; empty without a readout.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    strategy: str
    mode: str
    lossless: bool
    tiers: list[str]
    stats: Counters
    seed: int
    pair: str
    mask: str | None
    dtype: str
    device: str
    notes: list[str] = field(default_factory=list)
    loss: str = ""
    heads: str | None = None
    error: str | None = None
    readouts: Readouts = field(default_factory=Readouts)
    selected_layers: list[int | None] = field(default_factory=list)

    @property
    def target(self) -> str:
        """What `lossless` is about: the model's own readout, or a confident one."""
        return self.readouts.target

    def as_json(self) -> dict[str, Any]:
        """The JSON object of ``viasd-run --json``."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "error": self.error,
            "strategy": self.strategy,
            "mode": self.mode,
            "lossless": self.lossless,
            "target": self.target,
            "slim_readout": None if self.readouts.slim is None else self.readouts.slim.describe(),
            "pair": self.pair,
            "mask": self.mask,
            "heads": self.heads,
            "dtype": self.dtype,
            "device": self.device,
            "seed": self.seed,
            "tiers": self.tiers,
            "selected_layers": self.selected_layers,
            "stats": self.stats.as_json(),
            "notes": self.notes,
        }


def describe_loss(
    mode: str,
    counters: Counters,
    lossless: bool,
    alpha: float | None = None,
    *,
    greedy: bool = False,
    readout: ConfidentConfig | None = None,
) -> str:
    """How far an output can differ from the target's own, in one sentence; every lossy output carries it.

    Args:
        mode: The mode that ran.
        counters: Its counts.
        lossless: Whether nothing lossy ran.
        alpha: The bound of bounded mode.
        greedy: Whether the temperature was 0, where bounded mode promises something else.
        readout: The full verifier's, where it is not the model's own.
    """
    if readout is not None:
        said = describe_loss(mode, counters, lossless, alpha, greedy=greedy)
        return f"{said}; the target is the {readout.describe()}, not the model's own readout"
    if lossless:
        return "lossless: same law as the target alone"
    if mode == "bounded" and greedy:
        return f"LOSSY (bounded): each token has at least {1 - alpha:g} of the probability of the target's own choice"  # type: ignore[operator]
    if mode == "bounded":
        return f"LOSSY (bounded): each token's law is within total variation {alpha:g} of the target's"
    if mode == "unbounded" and counters.audit.blocks:
        audit = counters.audit
        return (
            f"LOSSY (unbounded): {counters.unseen} of {counters.emitted} tokens were taken without being tested; the full "
            f"verifier disagrees with {audit.disagreed:.3g} of {audit.tokens} such guesses"
        )
    if mode == "unbounded":
        return "LOSSY (unbounded): the law is the strategy's own, and nothing bounds how far it is from the target's"
    audit = counters.audit
    if counters.unseen == 0 and not audit.blocks:
        return "LOSSY mode via, but the full verifier checked every token of this answer"
    unseen = f"{counters.unseen} of {counters.emitted} tokens were not checked by the full verifier"
    if not audit.blocks:
        return f"LOSSY (via): {unseen}; none of such blocks was audited, so their disagreement is unknown"
    low, high = audit.interval
    return (
        f"LOSSY (via): {unseen}; audited disagreement of such blocks {audit.disagreed:.3g} in {audit.tokens} tokens "
        f"({len(audit.blocks)} blocks; 95 % interval {low:.1%} to {high:.1%})"
    )
