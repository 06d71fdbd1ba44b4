"""Measured seconds of every pass a round is made of, kept on disk: the same machine need not be asked twice."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import viasd
from viasd.hardware import cpu_name
from viasd.layered import LayeredModel
from viasd.mask import ModelIdentity
from viasd.pair import Pair
from viasd.remember import remembered
from viasd.routes import Route
from viasd.runtime.drafters.along import drafter_step, has_states
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget

_SIZES = (1, 2, 4, 8, 16, 32)  # tokens of a pass; what lies between is interpolated
_BUCKETS = (128, 512, 2048, 8192, 32768)  # lengths of the text before it
_REPEATS = 5
_PATIENCE = 3.0  # seconds after which one timing of each pass has to do: a large target on a small machine
_TIERS = ("full", "slim", "escalation")


@dataclass(frozen=True)
class CostTable:
    """Median seconds of passes at one length of text.

    Attributes:
        context: Tokens before the pass.
        full: Tokens of a pass -> seconds of the full verifier.
        slim: The same of the slim verifier; empty without one.
        escalation: The same of a full pass behind a slim one over all but the last token: it starts at the end of the
            shared prefix.
        drafter: One step of the drafter; 0 for lookup.
    """

    context: int
    full: dict[int, float]
    slim: dict[int, float]
    escalation: dict[int, float]
    drafter: float

    def full_seconds(self, tokens: int) -> float:
        """Seconds of a full pass over so many tokens, read out at all of them."""
        return interpolated(self.full, tokens)

    def slim_seconds(self, tokens: int) -> float:
        """The same of a slim pass."""
        return interpolated(self.slim, tokens)

    def as_json(self) -> dict[str, Any]:
        """For files and ``--json``."""
        return asdict(self)


def interpolated(known: Mapping[int, float], tokens: float) -> float:
    """Seconds of a pass over (a mean of) so many tokens: between measured sizes on straight lines, outside the nearest's."""
    sizes = sorted(known)
    if tokens <= sizes[0]:
        return known[sizes[0]]
    for low, high in pairwise(sizes):
        if tokens <= high:
            share = (tokens - low) / (high - low)
            return known[low] * (1 - share) + known[high] * share
    return known[sizes[-1]]


def cost_table(pair: Pair, route: Route | None, context: int, gamma: int, drafter: Route | None = None) -> CostTable:
    """The table of a pair at a length of text: remembered, read from the cache folder, or measured and kept there.

    Args:
        pair: The pair.
        route: Layers of the slim verifier, or None.
        context: Tokens before a pass; the next larger bucket is what is measured.
        gamma: Longest block; passes of up to ``gamma + 1`` tokens are measured.
        drafter: Layers of the self drafter, for that kind.
    """
    limit = pair.target.context_length - gamma - 2
    bucket = max(1, min(next((b for b in _BUCKETS if b >= context), _BUCKETS[-1]), limit))
    sizes = (*(s for s in _SIZES if s < gamma + 1), gamma + 1)
    key = ("costs", route, drafter, bucket, sizes, torch.get_num_threads())
    if key not in pair.measured:
        said = {
            "machine": [cpu_name(), os.cpu_count(), torch.get_num_threads(), accelerator(pair)],
            **models_said(pair),
            "routes": [None if r is None else r.key for r in (route, drafter)],
            "bucket": bucket,
            "sizes": list(sizes),
        }
        with torch.inference_mode():
            pair.measured[key] = remembered(
                "costs", said, lambda: _measure(pair, route, drafter, bucket, sizes), CostTable.as_json, _parsed
            )
    table: CostTable = pair.measured[key]
    return table


def models_said(pair: Pair) -> dict[str, Any]:
    """What of a pair decides its times and rows, for `viasd.remember.remembered`."""

    def of(model: LayeredModel | None) -> Any:
        # `form` says how the layers run (fused, quantised ...), which identity does not.
        return None if model is None else [asdict(ModelIdentity.of(model, "")), model.form, str(model.device)]

    return {
        "viasd": viasd.__version__,
        "torch": str(torch.__version__),
        "dtype": pair.dtype,
        "target": of(pair.target),
        "drafter": of(pair.drafter) or pair.drafter_kind,
        **({} if pair.feature is None else {"feature": [pair.feature.file.digest, pair.feature.form]}),
        **({} if pair.shortlist is None else {"shortlist": len(pair.shortlist)}),
        **({"lookup first": True} if pair.lookup_first else {}),
    }


def accelerator(pair: Pair) -> str:
    """Name of the device that passes run on."""
    return (
        torch.cuda.get_device_name(pair.target.device) if pair.target.device.type == "cuda" else pair.target.device.type
    )


def _parsed(data: Any) -> CostTable:
    tiers = {tier: {int(size): float(s) for size, s in data[tier].items()} for tier in _TIERS}
    return CostTable(int(data["context"]), **tiers, drafter=float(data["drafter"]))


def _measure(pair: Pair, route: Route | None, drafter: Route | None, bucket: int, sizes: Sequence[int]) -> CostTable:
    """Every pass in turn, several times over, so that a busy moment of the machine falls on all of them alike."""
    token = next(iter(pair.eos_ids), 0)
    text = [token] * (bucket + max(sizes))
    # (tier, tokens) -> what comes before the timed pass, and the pass
    runs: dict[tuple[str, int], tuple[Sequence[Callable[[], Any]], Callable[[], Any]]] = {}

    def ready(model: LayeredModel, layers: Route | None) -> TieredTarget:
        target = TieredTarget(model, layers, Counters())
        target.prefill(text[:1])
        target.kv.stretch(bucket)
        return target

    def add(name: str, target: TieredTarget, lengths: Sequence[int]) -> None:
        for length in lengths:
            back, block = partial(target.kv.roll_back, bucket), text[: bucket + length]
            full, slim = (partial(f, block, length) for f in (target.full, target.slim))
            first: tuple[Callable[[], Any], ...] = (back,)
            if name == "escalation" and length > 1:
                # The slim verifier runs the drafted tokens, the full one their successor too.
                first = (back, partial(target.slim, block[:-1], length - 1))
            timed = slim if name == "slim" else full
            runs[name, length] = (first, timed)

    add("full", ready(pair.target, None), sizes)
    if route is not None:
        add("slim", ready(pair.target, route), sizes)
        add("escalation", ready(pair.target, route), sizes)
    if has_states(pair):
        runs["drafter", 1] = drafter_step(pair, bucket)
    elif drafter is not None:
        own = ready(pair.target, drafter)
        runs["drafter", 1] = ((partial(own.kv.roll_back, bucket),), partial(own.slim, text[: bucket + 1], 1))
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
    begun = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        if repeat > 1 and time.perf_counter() - begun > _PATIENCE:
            break
        for key, (first, timed) in runs.items():
            for step in first:
                step()
            start = time.perf_counter()
            timed()
            if repeat:  # the first is a warm-up
                taken[key].append(time.perf_counter() - start)
    median = {key: statistics.median(seconds) for key, seconds in taken.items()}
    tiers = {tier: {size: s for (name, size), s in median.items() if name == tier} for tier in _TIERS}
    return CostTable(bucket, **tiers, drafter=median.get(("drafter", 1), 0.0))
