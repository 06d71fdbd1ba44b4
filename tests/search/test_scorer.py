from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import model_of, pair_of, prompt_ids, tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

import viasd
from viasd.attention import Segment
from viasd.divergences import stage_cost
from viasd.heads import LightHeads
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.tiers import _block_rows
from viasd.search.calibration import Passage
from viasd.search.scorer import ROWS, Score, Scorer
from viasd.testing import FAMILIES, tiny_model

ROUTE = Route.of([1, 1, 0, 1, 0, 0, 1, 1])
BLOCK = 6
TEXTS = ("hello hello world, hello again and again", "one two three one two three one")
PASSAGES = [Passage(tuple(prompt_ids(t)), 9) for t in TEXTS]  # 31 and 22 scored: the last blocks are filled in part


def rows_of(scorer: Scorer, route: Route, passage: Passage) -> torch.Tensor:
    with torch.inference_mode():
        blocks = [b.logits for b in scorer.blocks(route) if b.tokens == passage.tokens[:-1]]
    return torch.log_softmax(torch.cat(blocks), dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_the_runtimes_own_slim_passes(family: str) -> None:
    pair = pair_of(family)
    scorer = Scorer(pair.target, PASSAGES, block=BLOCK)
    costs, same = [], []
    for passage in PASSAGES:
        with torch.inference_mode():
            slim = _block_rows(pair, ROUTE, list(passage.tokens), passage.first, BLOCK)
            full = _block_rows(pair, Route.full(8), list(passage.tokens), passage.first, BLOCK)
        torch.testing.assert_close(rows_of(scorer, ROUTE, passage), slim, atol=2e-4, rtol=1e-3)
        costs.append(stage_cost(slim, full))
        same.append((slim.argmax(-1) == full.argmax(-1)).double())
    score = scorer.score(ROUTE)
    # q is kept in half precision.
    assert score.cost == pytest.approx(float(torch.cat(costs).mean()), abs=2e-3, rel=1e-2)
    assert score.agreement == pytest.approx(float(torch.cat(same).mean()))
    assert score.tokens == len(score.per_token) == scorer.tokens == sum(p.scored for p in PASSAGES)


def test_half_layers_are_scored_as_the_runtime_runs_them() -> None:
    pair = pair_of("llama")
    route = Route((True, True, False, False, True, True, False, True), ((2, "mlp"), (6, "attention")))
    scorer = Scorer(pair.target, PASSAGES, block=BLOCK)
    with torch.inference_mode():
        slim = _block_rows(pair, route, list(PASSAGES[0].tokens), 9, BLOCK)
    torch.testing.assert_close(rows_of(scorer, route, PASSAGES[0]), slim, atol=2e-4, rtol=1e-3)


def test_the_whole_target_costs_nothing() -> None:
    score = Scorer(pair_of("gemma3").target, PASSAGES).score(Route.full(8))
    assert score.cost == 0
    assert score.agreement == 1
    assert score.kl == pytest.approx(0, abs=1e-4)
    assert score.accept_mass == pytest.approx(1, abs=2e-3)


def test_a_mask_costs_the_same_bit_for_bit_whenever_it_is_scored() -> None:
    scorer = Scorer(pair_of("mistral").target, PASSAGES)
    first = scorer.score(ROUTE)
    scorer.score(Route.of([1, 0, 0, 1, 1, 1, 0, 1]))
    again, anew = scorer.score(ROUTE), Scorer(pair_of("mistral").target, PASSAGES).score(ROUTE)
    for other in (again, anew):
        assert torch.equal(first.per_token, other.per_token)
        assert (first.cost, first.kl, first.tv, first.agreement) == (other.cost, other.kl, other.tv, other.agreement)


def test_private_keys_equal_a_fresh_forward_of_the_slim_layers_alone() -> None:
    model = pair_of("mistral").target
    scorer = Scorer(model, PASSAGES, private_kv=True)
    for passage in PASSAGES:
        tokens = passage.tokens[:-1]
        with torch.inference_mode():
            step = model.step([Segment(model.new_kv(), 0, len(tokens))])
            hidden, _ = model.run(model.embed(tokens), ROUTE.layers, step)
            expected = torch.log_softmax(model.readout(hidden[:, passage.first - 1 :]), dim=-1)
        torch.testing.assert_close(rows_of(scorer, ROUTE, passage), expected, atol=2e-4, rtol=1e-3)
    shared = Scorer(model, PASSAGES).score(ROUTE)
    assert scorer.score(ROUTE).cost != shared.cost


def test_padded_rows_of_the_vocabulary_poison_nothing() -> None:
    model = tiny_model(vocab_size=320)
    pair = viasd.make_pair(model, tokenizer())
    with torch.no_grad():
        model.lm_head.weight[300:] = float("nan")
    score = Scorer(pair.target, PASSAGES).score(ROUTE)
    assert torch.isfinite(score.per_token).all()
    assert score.kl >= 0


class Watcher(TorchDispatchMode):
    """Records the largest number of fp32 rows over the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.float32, torch.float64):
                continue
            if tensor.dim() and tensor.shape[-1] == self.vocabulary:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return out


def test_no_fp32_tensor_of_all_tokens_by_the_vocabulary_ever_exists() -> None:
    text = tuple(prompt_ids("a long text that says the same thing over and over, " * 5))
    passages = [Passage(text, 5), Passage(text, 7)]
    with Watcher(300) as watcher:
        scorer = Scorer(pair_of("llama").target, passages)
        scorer.score(ROUTE)
    assert scorer.tokens > 4 * ROWS
    assert 0 < watcher.rows <= ROWS
    assert {rows.dtype for rows in scorer._rows} == {torch.float16}


def test_layers_before_the_first_skip_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(pair_of("llama").target, PASSAGES)
    ran: list[int] = []
    original = LayeredModel.run

    def run(self: LayeredModel, hidden: Any, layers: Any, *rest: Any, **options: Any) -> Any:
        ran.extend(layers := list(layers))
        return original(self, hidden, layers, *rest, **options)

    monkeypatch.setattr(LayeredModel, "run", run)
    scorer.score(ROUTE)
    assert sorted(set(ran)) == [3, 6, 7]
    assert (scorer.layers_run, scorer.layers_saved) == (3, 2)
    ran.clear()
    scorer.score(Route.full(8))
    assert ran == []


def test_partial_costs_are_reported_after_every_group_and_may_end_the_pass() -> None:
    text = tuple(prompt_ids("a long text that says the same thing over and over, " * 5))
    scorer = Scorer(pair_of("llama").target, [Passage(text, 100 + i) for i in range(4)])
    told: list[tuple[int, float]] = []
    score = scorer.score(ROUTE, lambda group, score: told.append((group, score.cost)))
    assert [g for g, _ in told] == list(range(scorer.groups))
    assert scorer.groups > 1
    assert told[-1][1] == score.cost

    class Enough(Exception):
        pass

    def stop(group: int, score: Score) -> None:
        raise Enough

    before = scorer.groups_run
    with pytest.raises(Enough):
        scorer.score(ROUTE, stop)
    assert scorer.groups_run == before + 1
    assert scorer.score(ROUTE).cost == score.cost


def test_scoring_leaves_the_model_as_it_was() -> None:
    model = model_of("qwen2")
    ids = torch.tensor([prompt_ids()])
    before = model(ids).logits
    Scorer(pair_of("qwen2").target, PASSAGES).score(ROUTE)
    assert torch.equal(model(ids).logits, before)


def test_drafted_tokens_get_the_ratio_of_the_gate() -> None:
    text = tuple(prompt_ids("a long text that says the same thing over and over, " * 5))
    scorer = Scorer(pair_of("llama").target, [*PASSAGES, Passage(text, 90), Passage(text[:200], 100)])
    assert scorer.groups > 1
    drafted = torch.arange(scorer.tokens) % 50
    score = scorer.score(ROUTE, drafted=drafted)
    with torch.inference_mode():
        rows = torch.cat([block.logits for block in scorer.blocks(ROUTE)])
    assert torch.equal(score.best, rows.argmax(dim=-1))
    assert torch.equal(score.best, scorer.answers(ROUTE))
    law = rows.softmax(dim=-1)
    expected = law.gather(1, drafted[:, None])[:, 0] / law.amax(dim=-1)
    assert score.ratio is not None
    torch.testing.assert_close(score.ratio, expected, rtol=1e-4, atol=1e-6)
    assert sum(t.length for t in scorer.texts) == scorer.tokens == len(scorer.best)


def test_a_prefix_is_scored_by_its_head_as_the_runtime_reads_it() -> None:
    pair = pair_of("gemma2")
    heads = LightHeads((3, 5), torch.eye(32).repeat(2, 1, 1), torch.arange(3, 280))
    scorer = Scorer(pair.target, PASSAGES, block=BLOCK)
    for layers, head in heads.bind(pair.target).items():
        route = Route(tuple(i < layers for i in range(8)), readout=head)
        same = []
        for passage in PASSAGES:
            with torch.inference_mode():
                slim = _block_rows(pair, route, list(passage.tokens), passage.first, BLOCK)
                full = _block_rows(pair, Route.full(8), list(passage.tokens), passage.first, BLOCK)
            torch.testing.assert_close(
                rows_of(scorer, route, passage).clamp_min(-50), slim.clamp_min(-50), atol=2e-4, rtol=1e-3
            )
            same.append((slim.argmax(-1) == full.argmax(-1)).double())
        assert scorer.score(route).agreement == pytest.approx(float(torch.cat(same).mean()))
        assert torch.equal(scorer.answers(route), scorer.score(route).best)
