"""What a pass costs on this machine, and how much of it the memory explains."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from viasd.layered import LayeredModel
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.bench.methods import clock
from viasd.runtime.drafters.along import drafter_step, has_states
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget

CONTEXT = 128
_REPEATS = 9
_PROBE_BYTES = 1 << 30  # beyond any cache: what is wanted is the memory's own speed


def pass_seconds(pair: Pair, masks: Mapping[str, LayerMask], gammas: Sequence[int]) -> dict[str, dict[int, float]]:
    """Median seconds of a pass by number of tokens (1, 2 and gamma + 1), after a context of `CONTEXT` tokens.

    Args:
        pair: The pair.
        masks: Slim verifiers to time, by name.
        gammas: Draft lengths.

    Returns:
        ``full``, ``slim`` (or ``slim/NAME`` where there are several) and, where it is a model, ``drafter`` (one token)
        -> tokens -> seconds.
    """
    sizes = sorted({1, 2, *(gamma + 1 for gamma in gammas)})
    context = min(CONTEXT, pair.target.context_length - sizes[-1] - 1)
    tokens = [5 + i % 50 for i in range(context + sizes[-1])]
    jobs: dict[tuple[str, int], Callable[[], object]] = {}
    for name, mask in [("full", None), *((slim_name(n, masks), m) for n, m in masks.items())]:
        target = TieredTarget(pair.target, None if mask is None else mask.route, Counters())
        with torch.inference_mode():
            target.prefill(tokens[:context])
        for size in sizes:
            jobs[name, size] = _pass_of(target, tokens[: context + size], context, slim=mask is not None)
    if has_states(pair):
        with torch.inference_mode():
            before, step = drafter_step(pair, context)

        def job() -> object:
            for back in before:
                back()
            return step()

        jobs["drafter", 1] = job
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in jobs}
    with torch.inference_mode():
        for repeat in range(_REPEATS + 1):
            for key, job in jobs.items():
                start = clock(pair.target.device)
                job()
                if repeat:
                    taken[key].append(clock(pair.target.device) - start)
    seconds: dict[str, dict[int, float]] = {}
    for (name, size), values in taken.items():
        seconds.setdefault(name, {})[size] = statistics.median(values)
    return seconds


def slim_name(mask: str, masks: Mapping[str, LayerMask]) -> str:
    """How the table calls a slim verifier."""
    return "slim" if len(masks) == 1 else f"slim/{mask}"


def _pass_of(target: TieredTarget, tokens: list[int], context: int, *, slim: bool) -> Callable[[], object]:
    rows = len(tokens) - context

    def run() -> object:
        target.kv.roll_back(context)
        return target.slim(tokens, rows) if slim else target.full(tokens, rows)

    return run


def bytes_per_token(model: LayeredModel) -> int:
    """Bytes of weights that a single-token pass has to read: all layers, the final norm and the head, as they are stored.

    Of the embedding only one row is read, unless it is tied, in which case it is the head. Keys and values are left out.
    """
    return sum(weight.numel() * weight.element_size() for weight in model.step_tensors)


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second at which this device reads memory, with torch's current number of threads: the best of several."""
    numbers = _PROBE_BYTES // 4
    side = 1 << 13
    with torch.inference_mode():
        flat = torch.ones(numbers, device=device)
        matrix, vector = flat.view(-1, side), torch.ones(side, device=device)
        best = float("inf")
        for job in (flat.sum, lambda: torch.mv(matrix, vector)):
            for repeat in range(6):
                start = clock(device)
                job()
                if repeat:
                    best = min(best, clock(device) - start)
    return _PROBE_BYTES / best


def measure(pair: Pair, masks: Mapping[str, LayerMask], gammas: Sequence[int]) -> dict[str, Any]:
    """Costs of passes and the memory limit, as the summary's ``costs`` and ``bandwidth``."""
    seconds = pass_seconds(pair, masks, gammas)
    read, bandwidth = bytes_per_token(pair.target), read_bandwidth(pair.target.device)
    return {
        "costs": {
            "context": CONTEXT,
            "seconds": {name: {str(n): s for n, s in row.items()} for name, row in seconds.items()},
            "relative": {name: {str(n): s / row[1] for n, s in row.items()} for name, row in seconds.items()},
        },
        "bandwidth": {
            "bytes_per_token": read,
            "bytes_per_second": bandwidth,
            "limit_tokens_per_second": bandwidth / read,
        },
    }
