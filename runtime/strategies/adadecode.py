"""AdaDecode (arXiv 2506.03700): guesses at exits inside the target, whose other layers run together with later tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from viasd.estimator import logit_of_max
from viasd.rows import Row, Rows
from viasd.runtime.exits import ExitRule
from viasd.runtime.judge import judge_block
from viasd.runtime.strategies.base import Emission, SolitaryStrategy, Workbench
from viasd.runtime.wave import Wave
from viasd.sampling import Ahead
from viasd.shortlist import ShortRow


class AdaDecode(SolitaryStrategy):
    """Early prediction with deferred layers, verified.

    A round is one cycle of the wave: guesses wait at their exits until a token reaches the top and takes all of them along;
    there each is tested against the row of the full verifier with the head's processed row as its proposal law.

    Args:
        bench: What the request works with.
        wave: The way through the target.
        rule: Whether to exit.
        max_pending: Most guesses of a cycle; 0 is plain decoding.
        alpha: Lossy acceptance (`bounded` mode); 0 is exact.
        verify: False takes every guess as it is (an ablation, lossy); how often the full verifier would have said otherwise
            is counted, as audits of every cycle.
        stop_tokens: After one of these no more is guessed.
    """

    def __init__(
        self,
        bench: Workbench,
        wave: Wave,
        rule: ExitRule,
        *,
        max_pending: int,
        alpha: float = 0.0,
        verify: bool = True,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        self._bench = bench
        self._wave = wave
        self._rule = rule
        self._max_pending = max_pending
        self._alpha = alpha
        self._verify = verify
        self._stop_tokens = stop_tokens

    def round(self, tokens: Sequence[int], room: int) -> Emission:
        """See `Strategy`."""
        bench, counters, wave = self._bench, self._bench.counters, self._wave
        counters.rounds += 1
        # The top always adds a token of its own.
        limit = min(self._max_pending, room - 1)
        pending: list[int] = []
        laws: list[Row] = []
        exits: list[int] = []
        ahead = bench.sampler.ahead(tokens)
        wave.begin(tokens)
        self._rule.begin()
        token = tokens[-1]
        while True:
            wave.enter(token)
            ended = bool(pending) and token in self._stop_tokens
            found = self._climbed(ahead) if len(pending) < limit and not ended else None
            if found is None:
                break
            ahead, row, layers = found
            self._rule.waits()
            wave.wait()
            token = bench.draws.draft(row)
            ahead.push(token)
            pending.append(token)
            laws.append(row)
            exits.append(layers)
        while wave.climb(exits=False) < wave.layers:
            pass
        counters.drafted += len(pending)
        return self._decided(tokens, wave.top(), pending, laws, exits)

    def _climbed(self, ahead: Ahead) -> tuple[Ahead, Row, int] | None:
        """Lets the newest token climb until it exits.

        Returns:
            The request's processors after they saw the head's row, the law of the guess, and the layers run; None where no
            exit was taken.
        """
        wave, rule, sampler = self._wave, self._rule, self._bench.sampler
        for _ in wave.exits:
            layers = wave.climb(exits=True)
            if not rule.looks(layers, wave.promise()):
                continue
            # A head that is read in vain must leave no trace in stateful processors.
            then = ahead.fork()
            row = wave.guess()
            if sampler.has_processors:  # they see whole rows
                row = ShortRow.of(then.next(row.dense))
            if rule.exits(layers, float(logit_of_max(row.known, sampler.config.temperature))):
                law = Row(token=row.best[1]) if sampler.greedy else sampler.law(row.dense[None])[0]
                return then, law, layers
        return None

    def _decided(
        self, tokens: Sequence[int], logits: Tensor, pending: list[int], laws: list[Row], exits: list[int]
    ) -> Emission:
        bench, counters, n = self._bench, self._bench.counters, len(pending)
        if not self._verify:
            return self._taken(tokens, logits, pending, laws, exits)
        verdict, q = judge_block(
            logits,
            pending,
            Rows.joined(laws) if pending else Rows(tokens=()),
            bench.sampler,
            bench.sampler.ahead(tokens),
            bench.draws,
            self._alpha,
        )
        kept = verdict.accepted
        judged = min(kept + 1, n)
        counters.gated += judged
        counters.kept += kept
        counters.early.ended(exits, kept if kept < n else None)
        # Nothing is learnt from lossy acceptance: its labels are not those of the exact test.
        if not self._alpha:
            self._rule.judged([_agreement(laws[i], q[i], pending[i]) for i in range(judged)])
        return Emission(
            [*pending[:kept], verdict.token],
            ["drafter"] * kept + ["full"],
            logits[: kept + 1],
            [True] * kept + [False],
        )

    def _taken(
        self, tokens: Sequence[int], logits: Tensor, pending: list[int], laws: list[Row], exits: list[int]
    ) -> Emission:
        """Without verification: every guess stands; what the full verifier would have said is only counted."""
        bench, counters, n = self._bench, self._bench.counters, len(pending)
        processed = bench.sampler.ahead(tokens).block(logits, pending)
        q = bench.sampler.law(processed)
        counters.early.ended(exits, None)
        if n:
            agreed = sum(_agreement(laws[i], q[i], pending[i]) for i in range(n))
            counters.audit.blocks.append((n, min(float(n), max(0.0, n - agreed))))  # fp32 sums may pass 1
        token = bench.draws.token(q[n])
        return Emission([*pending, token], ["drafter"] * n + ["full"], logits, [True] * n + [False], unseen=n)


def _agreement(guess: Row, q: Row, token: int) -> float:
    """How far the verifier agrees with a guess: sum min(p, q) where it is drawn, 0 or 1 at temperature 0."""
    if guess.probs is None or q.probs is None:
        return q.prob(token)
    return float(torch.minimum(guess.probs, q.probs).sum())
