"""One cache, two watermarks: whatever happened before, q's rows equal a forward without any cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tiny import LOSSLESS, generate, hf_greedy, model_of, pair_of, prompt_ids, watch_writes

from viasd.errors import OptionError
from viasd.kv import SequenceKV
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget

TOLERANCE = {"rtol": 5e-4, "atol": 5e-4}


def fresh(model: Any, tokens: list[int], rows: int) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -rows:].float()


ROUTES = [
    LayerMask.even(8, 0.25).route,
    LayerMask.even(8, 0.6).route,
    Route.of([1, 0, 0, 1, 1, 1, 1, 1]),  # the shared prefix is one layer
    Route.of([1, 1, 1, 1, 1, 1, 0, 1]),  # it is nearly everything
    Route.full(8),
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda r: "".join(str(int(k)) for k in r.keep))
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.inference_mode()
def test_the_full_verifiers_rows_after_any_history_equal_a_fresh_forward(family: str, route: Route) -> None:
    hf = model_of(family)
    model = load_layered(hf)
    for seed in range(5):
        rng = random.Random(f"{family}{route}{seed}")
        tokens = [rng.randrange(300) for _ in range(rng.randrange(1, 14))]
        target = TieredTarget(model, route, Counters())
        target.prefill(tokens[:-1])
        while len(tokens) < 60:
            block = [rng.randrange(300) for _ in range(rng.randrange(1, 6))]
            match rng.choice(["accept", "rewrite", "escalate", "audit", "refuse", "step", "twice"]):
                case "accept":  # everything stands, as the slim path ran it
                    target.slim([*tokens, *block[:-1]], len(block))
                    tokens += block
                case "rewrite":  # something else stands at the end of what was run
                    target.slim([*tokens, *block], len(block) + 1)
                    tokens += [*block[: rng.randrange(len(block))], rng.randrange(300)]
                case "escalate":
                    target.slim([*tokens, *block[:-1]], len(block))
                    at = rng.randrange(len(block))
                    tentative = [*tokens, *block[:at], *[rng.randrange(300) for _ in range(rng.randrange(1, 4))]]
                    rows = len(tentative) - len(tokens) + 1
                    # Tokens behind `at` differ from those the slim path ran: only what it ran for the same text may be used.
                    target.settle([*tokens, *block[:at], 0])
                    torch.testing.assert_close(target.full(tentative, rows), fresh(hf, tentative, rows), **TOLERANCE)
                    tokens = [*tentative[: len(tokens) + rng.randrange(rows)], rng.randrange(300)]
                case "audit":
                    target.slim([*tokens, *block[:-1]], len(block))
                    tentative = [*tokens, *block]
                    rows = len(block) + 1
                    torch.testing.assert_close(target.full(tentative, rows), fresh(hf, tentative, rows), **TOLERANCE)
                    tokens = tentative[: len(tokens) + rng.randrange(1, rows)]
                case "refuse":  # the block leaves no trace
                    target.slim([*tokens, *block], len(block) + 1)
                    tokens.append(rng.randrange(300))
                case "step":
                    torch.testing.assert_close(target.full(tokens, 1), fresh(hf, tokens, 1), **TOLERANCE)
                    tokens.append(rng.randrange(300))
                case "twice":  # the slim path goes on from its own pending positions
                    target.slim([*tokens, *block], 1)
                    tokens += [*block, rng.randrange(300)]
                    target.settle(tokens)
                    target.slim(tokens, 1)
                    tokens.append(rng.randrange(300))
            target.settle(tokens)
            kv = target.kv
            assert 0 <= kv.full_len <= kv.slim_len <= len(tokens) - 1
            assert (kv.boundary is None) == (kv.pending == 0)
            assert kv.boundary is None or kv.boundary.shape[1] == kv.pending
        torch.testing.assert_close(target.full(tokens, 1), fresh(hf, tokens, 1), **TOLERANCE)


@torch.inference_mode()
def test_the_slim_path_reads_full_keys_below_the_watermark_and_its_own_above() -> None:
    model, ids = load_layered(model_of("llama")), prompt_ids()
    route = LayerMask.even(8, 0.5).route
    target = TieredTarget(model, route, Counters())
    target.prefill(ids[:10])
    one_by_one = torch.cat([target.slim(ids[: n + 1], 1) for n in range(10, 16)])
    other = TieredTarget(model, route, Counters())
    other.prefill(ids[:10])
    torch.testing.assert_close(other.slim(ids[:16], 6), one_by_one, **TOLERANCE)
    alone = TieredTarget(model, route, Counters())
    assert not torch.allclose(alone.slim(ids[:16], 6), one_by_one, atol=1e-2)


@torch.inference_mode()
def test_an_escalation_runs_the_layers_before_the_gap_only_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = load_layered(model_of("llama")), prompt_ids()
    target = TieredTarget(model, Route.of([1, 1, 1, 0, 1, 1, 1, 1]), Counters())
    target.prefill(ids[:10])
    target.slim(ids[:14], 4)
    written: dict[int, list[tuple[int, int]]] = {}

    def watched(kv: SequenceKV, layer: int, start: int, tokens: int) -> None:
        written.setdefault(layer, []).append((start, start + tokens))

    watch_writes(monkeypatch, watched)
    target.full(ids[:16], 6)
    assert written == {i: [(14, 16)] if i < 3 else [(10, 16)] for i in range(8)}


@torch.inference_mode()
def test_a_full_pass_that_ends_below_the_slim_watermark_uses_only_its_own_positions() -> None:
    model, ids = load_layered(model_of("llama")), prompt_ids()
    target = TieredTarget(model, LayerMask.even(8, 0.5).route, Counters())
    target.prefill(ids[:10])
    target.slim(ids[:16], 6)
    torch.testing.assert_close(target.full(ids[:13], 3), fresh(model.model, ids[:13], 3), **TOLERANCE)
    assert (target.kv.full_len, target.kv.slim_len, target.kv.boundary) == (13, 13, None)


def test_without_a_route_there_is_no_slim_verifier() -> None:
    with pytest.raises(OptionError, match="needs a mask"):
        TieredTarget(load_layered(model_of("llama")), None, Counters()).slim([1, 2], 1)


@pytest.mark.parametrize("off_by", [None, 1, 2])
@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("strategy", ["sd", "chain"])
def test_without_rollback_the_output_goes_wrong(
    strategy: str, drafter: str, off_by: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other tests can only be trusted if they notice this."""
    pair = pair_of("llama", drafter)
    expected = hf_greedy(model_of("llama"), prompt_ids(), 40)
    whole = SequenceKV.roll_back

    def broken(self: SequenceKV, length: int) -> None:
        if off_by is not None:
            whole(self, length + off_by)

    assert generate(pair, prompt_ids(), **LOSSLESS[strategy]).token_ids == expected
    monkeypatch.setattr(SequenceKV, "roll_back", broken)
    try:
        wrong = generate(pair, prompt_ids(), **LOSSLESS[strategy]).token_ids
    except (RuntimeError, IndexError, AssertionError, ValueError):
        return
    assert wrong != expected
