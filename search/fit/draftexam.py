"""What a drafter is worth on text that it did not learn from: row by row, and decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from viasd.draws import SeededDraws
from viasd.pair import Pair
from viasd.runtime.assembly import Assembly
from viasd.runtime.config import DecodingConfig, Plan
from viasd.runtime.metrics import Counters
from viasd.runtime.session import Ending, rounds
from viasd.runtime.strategies import SpeculativeDecoding, Workbench
from viasd.runtime.target import TieredTarget
from viasd.sampling import Sampler, SamplingConfig
from viasd.search.fit.corpus import Batch, Corpus
from viasd.search.fit.draftloss import Judged
from viasd.search.fit.teaching import Teacher

GAMMA = 4
TOKENS = 64  # written per prompt


class Taught(Protocol):
    """A drafter that is trained, of either kind."""

    def judged(self, batch: Batch, teacher: Teacher, weight: float) -> tuple[Judged, int] | None:
        """Every step ahead along a batch, and how many positions that are; None where nothing is scored."""
        ...


@torch.no_grad()
def examine(stack: Taught, batches: Sequence[Batch], teacher: Teacher, weight: float) -> dict[str, Any]:
    """Rows along some batches: per step ahead accepted mass at temperature 1, KL, and how often both say the same word."""
    sums: list[list[float]] = []
    tokens = 0
    for batch in batches:
        found = stack.judged(batch, teacher, weight)
        if found is None:
            continue
        judged, n = found
        tokens += n
        rows = torch.stack([judged.accept, judged.agree, judged.kl], dim=1).tolist()
        sums = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(sums, rows, strict=True)] if sums else rows
    names = ("accept_mass", "agreement", "kl")
    steps = [{name: value / tokens for name, value in zip(names, row, strict=True)} for row in sums]
    return {"tokens": tokens, "steps": steps}


@torch.inference_mode()
def decode(pair: Pair, corpus: Corpus, numbers: Sequence[int], prompts: int) -> dict[str, Any]:
    """Decodes some held-out prompts at temperature 0 with blocks of fixed length, and counts what is kept.

    Args:
        pair: With the drafter.
        corpus: Of the prompts.
        numbers: Conversations whose prompts may be taken; evenly spread ones are.
        prompts: How many.

    Returns:
        ``acceptance``: share kept of the drafted tokens whose fate is known (those before and at the first refusal);
        ``by_place``: the same for each place of a block, of blocks that reached it; ``emitted_per_round``; and how measured.
    """
    chosen = numbers[:: max(1, len(numbers) // prompts)][:prompts]
    kept, met = [0] * GAMMA, [0] * GAMMA
    emitted = blocks = 0
    for number in chosen:
        prompt = corpus.conversation(number)[: int(corpus.answer[number])].tolist()
        room = min(TOKENS, pair.target.context_length - len(prompt))
        counters, sampler, tokens = Counters(), Sampler(SamplingConfig()), list(prompt)
        target = TieredTarget(pair.target, None, counters)
        bench = Workbench(target, sampler, SeededDraws(0), counters)
        config = DecodingConfig(strategy="sd", gamma=GAMMA, draft_length="fixed")
        plan = Plan("sd", "lossless")
        assembly = Assembly(pair, config, plan, None, target, pair.eos_ids, len(prompt), lambda note: None)
        drafter = assembly.drafter(bench)
        assert drafter is not None  # sd drafts
        target.prefill(tokens[:-1])
        strategy = SpeculativeDecoding(bench, drafter, gamma=GAMMA)
        before = 0
        for emission, _ in rounds(strategy, target, drafter, sampler, tokens, Ending(room, pair.eos_ids)):
            drafted, before = counters.drafted - before, counters.drafted
            n = sum(emission.drafted)
            emitted += len(emission.tokens)
            blocks += 1
            for place in range(min(n + 1, drafted)):
                met[place] += 1
                kept[place] += place < n
    return {
        "prompts": len(chosen),
        "tokens": emitted,
        "gamma": GAMMA,
        "acceptance": sum(kept) / max(1, sum(met)),
        "by_place": [k / m if m else 0.0 for k, m in zip(kept, met, strict=True)],
        "emitted_per_round": emitted / max(1, blocks),
    }
