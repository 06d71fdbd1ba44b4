from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import generate, model_of, pair_of, prompt_ids

from viasd.draws import SeededDraws
from viasd.errors import OptionError
from viasd.mask import LayerMask
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.runtime.drafters import Draft, LookupDrafter, ModelDrafter, SelfDrafter
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.sampling import Sampler, SamplingConfig


def ahead(tokens: Sequence[int], **sampling: Any) -> Any:
    return Sampler(SamplingConfig(**sampling)).ahead(tokens)


def propose(drafter: Any, tokens: list[int], limit: int = 5, **sampling: Any) -> Draft:
    drafter.settle(tokens)
    draft: Draft = drafter.propose(tokens, limit, ahead(tokens, **sampling), SeededDraws(0))
    return draft


def slow_lookup(tokens: list[int], limit: int) -> list[int]:
    """Prompt lookup by its definition."""
    for size in (3, 2, 1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :] and size <= len(tokens):
                text = list(tokens)
                out: list[int] = []
                while len(out) < limit and end < len(text):
                    out.append(text[end])
                    text.append(text[end])
                    end += 1
                return out
    return []


def test_lookup_proposes_what_followed_the_latest_occurrence_of_the_longest_match() -> None:
    drafter = LookupDrafter(Counters())
    assert propose(drafter, [1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3], 3).tokens == [7, 9, 2]
    assert propose(LookupDrafter(Counters()), [4, 3, 7, 5, 3, 8, 6, 3], 2).tokens == [8, 6]
    assert propose(LookupDrafter(Counters()), [1, 2, 3], 4).tokens == []
    assert propose(LookupDrafter(Counters()), [5], 4).tokens == []
    assert propose(LookupDrafter(Counters()), [5, 5], 4).tokens == [5, 5, 5, 5]


def test_the_index_grown_in_steps_is_that_of_the_whole_text() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        tokens = [rng.randrange(4) for _ in range(3)]
        drafter = LookupDrafter(Counters())
        while len(tokens) < 60:
            assert propose(drafter, tokens).tokens == slow_lookup(tokens, 5), (seed, tokens)
            tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 5))]


def test_lookup_indexes_nothing_tentative() -> None:
    drafter = LookupDrafter(Counters())
    committed = [1, 2, 3, 9]
    drafter.settle(committed)
    tentative = [*committed, 7, 8, 7]
    before = dict(drafter._latest)
    drafter.rewind(tentative)
    assert drafter.propose(tentative, 4, ahead(tentative), SeededDraws(0)).tokens == []
    assert drafter._latest == before
    assert drafter.propose([*committed, 1], 2, ahead(committed), SeededDraws(0)).tokens == [2, 3]


def test_lookup_is_a_point_mass_with_the_share_of_occurrences_as_confidence() -> None:
    tokens = [1, 2, 9, 1, 2, 9, 1, 2, 8, 1, 2]
    draft = propose(LookupDrafter(Counters(), longest=2), tokens, 1)
    assert draft.tokens == [8]
    assert draft.rows.tokens == (8,)
    assert draft.confidence == [pytest.approx(1 / 3)]
    assert draft.logits == []
    assert propose(LookupDrafter(Counters(), longest=2, min_confidence=0.34), tokens, 1).tokens == []
    assert propose(LookupDrafter(Counters(), longest=2, min_confidence=0.33), tokens, 1).tokens == [8]


def test_lookup_keeps_a_stop_token_and_ends_there() -> None:
    tokens = [1, 2, 3, 4, 5, 1]
    assert propose(LookupDrafter(Counters(), stop_tokens=frozenset({3})), tokens).tokens == [2, 3]


def test_next_token_is_the_first_of_a_proposal() -> None:
    assert LookupDrafter(Counters()).next_token([1, 2, 3, 1]) == 2
    assert LookupDrafter(Counters()).next_token([1, 2, 3]) is None


def drafters() -> dict[str, Any]:
    model = load_layered(model_of("llama"))
    return {"model": ModelDrafter(model, Counters()), "self": SelfDrafter(_prefilled(model), Route.full(8))}


def _prefilled(model: Any) -> TieredTarget:
    with torch.inference_mode():
        target = TieredTarget(model, None, Counters())
        target.prefill(prompt_ids()[:-1])
    return target


@pytest.mark.parametrize("kind", ["model", "self"])
@torch.inference_mode()
def test_a_drafter_over_all_layers_drafts_the_targets_own_text(kind: str) -> None:
    ids = prompt_ids()
    draft = propose(drafters()[kind], ids, 6)
    expected = generate(pair_of("llama"), ids, strategy="plain", max_new_tokens=6).token_ids
    assert draft.tokens == expected
    assert draft.rows.tokens == tuple(expected)
    for token, logits, confidence in zip(draft.tokens, draft.logits, draft.confidence, strict=True):
        assert confidence == pytest.approx(float(logits.softmax(-1)[token]), abs=1e-6)


@pytest.mark.parametrize("kind", ["model", "self"])
@torch.inference_mode()
def test_rows_are_those_the_tokens_were_drawn_from(kind: str) -> None:
    ids = prompt_ids()
    options = {"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.3}
    draft = propose(drafters()[kind], ids, 5, **options)
    assert draft.rows.probs is not None
    for i, logits in enumerate(draft.logits):
        expected = ahead([*ids, *draft.tokens[:i]], **options).row(logits)
        assert torch.equal(draft.rows.probs[i], expected.probs)
        assert draft.rows[i].prob(draft.tokens[i]) > 0


@torch.inference_mode()
def test_low_confidence_stops_before_drawing_and_never_drops_a_drawn_token() -> None:
    ids, model = prompt_ids(), load_layered(model_of("llama"))
    whole = propose(ModelDrafter(model, Counters()), ids, 8, temperature=1.0)
    tops = [float(row.softmax(-1).max()) for row in whole.logits]
    for bound in sorted(tops):
        draft = propose(ModelDrafter(model, Counters(), min_confidence=bound + 1e-6), ids, 8, temperature=1.0)
        stop = next((i for i, top in enumerate(tops) if top < bound + 1e-6), 8)
        assert draft.tokens == whole.tokens[:stop]
        assert all(float(row.softmax(-1).max()) >= bound for row in draft.logits)
    # An unlikely draw from a confident row stays.
    assert min(whole.confidence) < min(tops)


@torch.inference_mode()
def test_a_stop_token_ends_the_draft_and_is_kept() -> None:
    ids, model = prompt_ids(), load_layered(model_of("llama"))
    whole = propose(ModelDrafter(model, Counters()), ids, 6).tokens
    stop = whole[2]
    draft = propose(ModelDrafter(model, Counters(), stop_tokens=frozenset({stop})), ids, 6)
    assert draft.tokens == whole[: whole.index(stop) + 1]


@torch.inference_mode()
def test_nothing_is_drafted_without_room() -> None:
    for drafter in (*drafters().values(), LookupDrafter(Counters())):
        for limit in (0, -1):
            assert propose(drafter, prompt_ids(), limit).tokens == []


def test_the_self_drafter_keeps_only_what_the_slim_verifier_keeps() -> None:
    model = load_layered(model_of("llama"))
    target = TieredTarget(model, LayerMask.even(8, 0.5).route, Counters())
    with pytest.raises(OptionError, match="must keep only layers that the slim verifier keeps"):
        SelfDrafter(target, Route.full(8))
    SelfDrafter(target, LayerMask.even(8, 0.5).route)
    SelfDrafter(TieredTarget(model, None, Counters()), Route.full(8))


@torch.inference_mode()
def test_the_self_drafter_goes_on_behind_all_that_it_has_run() -> None:
    # Several tokens have not been run when a block begins, as where all of the one before was kept.
    ids, model = prompt_ids(), load_layered(model_of("llama"))
    target = TieredTarget(model, None, Counters())
    target.prefill(ids[:-4])
    draft = propose(SelfDrafter(target, Route.full(8)), ids, 6)
    whole = TieredTarget(model, None, Counters()).full([*ids, *draft.tokens], 7)[:-1]
    torch.testing.assert_close(torch.stack(list(draft.logits)), whole, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_self_drafter_leaves_the_watermarks_alone() -> None:
    model = load_layered(model_of("llama"))
    target = _prefilled(model)
    before = (target.kv.full_len, target.kv.slim_len)
    propose(SelfDrafter(target, LayerMask.even(8, 0.6).route), prompt_ids(), 5)
    assert (target.kv.full_len, target.kv.slim_len) == before


@pytest.mark.parametrize("drafter", ["lookup", "self", "model"])
def test_a_drafter_without_confidence_leaves_plain_decoding(drafter: str) -> None:
    pair = pair_of("llama", drafter)
    plain = generate(pair, prompt_ids(), strategy="plain").token_ids
    result = generate(pair, prompt_ids(), strategy="sd", draft_length="fixed", draft_min_prob=1.0)
    assert result.token_ids == plain
    assert drafter == "lookup" or result.stats.drafted == 0
    half = generate(pair, prompt_ids(), strategy="sd", draft_length="fixed", draft_min_prob=0.5)
    assert half.token_ids == plain


@pytest.mark.parametrize("length", [9, 10, 11, 12, 21, 23])
def test_a_long_prompt_leaves_as_many_tokens_for_the_last_pass_as_rows_are_wanted(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import viasd.runtime.drafters.line as drafters

    model = load_layered(model_of("llama"))
    tokens = [5 + i for i in range(length)]
    with torch.inference_mode():
        expected = ModelDrafter(model, Counters()).rows(tokens, 4)
        monkeypatch.setattr(drafters, "prefill_chunk", lambda device: 10)
        drafter = ModelDrafter(model, Counters())
        rows = drafter.rows(tokens, 4)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)
    assert drafter.kv.full_len == length
