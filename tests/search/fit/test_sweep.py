from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import pair_of, prompt_ids

import viasd
from viasd.attention import Segment
from viasd.errors import FitError, OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.runtime.metrics import Counters
from viasd.runtime.target import TieredTarget
from viasd.search.calibration import Passage
from viasd.search.fit.ridge import Moments
from viasd.search.fit.sweep import fit_stitches
from viasd.search.scorer import Scorer
from viasd.testing import byte_tokenizer, tiny_model

ROUTE = Route.of([1, 1, 0, 1, 0, 0, 1, 1])
BLOCK = 5


def text(n: int, seed: int = 0) -> list[Passage]:
    generator = torch.Generator().manual_seed(seed)
    words = ["hello ", "world ", "again ", "and ", "one two ", "three, "]
    passages = []
    for i in range(n):
        chosen = torch.randint(len(words), (9,), generator=generator).tolist()
        passages.append(Passage(tuple(prompt_ids("".join(words[c] for c in chosen))), 1 + i % 7))
    return passages


PASSAGES = text(24)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_each_gap_is_fitted_from_the_slim_states_that_decoding_would_have(family: str) -> None:
    model = pair_of(family).target
    maps, fits = fit_stitches(model, ROUTE, PASSAGES, block=BLOCK, ridge=0.01)
    assert [(f.start, f.end) for f in fits] == [(2, 3), (4, 6)]
    # By hand, by the runtime's own slim passes: block after block above the full path's keys.
    made: dict[int, object] = {}
    for end in (3, 6):
        moments = Moments(32)
        for passage in PASSAGES:
            tokens = list(passage.tokens[:-1])
            with torch.inference_mode():
                step = model.step([Segment(model.new_kv(), 0, len(tokens))])
                _, full = model.run(model.embed(tokens), range(8), step, capture=(end,))
                target = TieredTarget(model, None, Counters())
                for start in range(passage.first - 1, len(tokens), BLOCK):
                    target.kv.roll_back(start)
                    target.prefill(tokens[:start])
                    stop = min(start + BLOCK, len(tokens))
                    blocks = model.step([Segment(target.kv, start, stop - start)])
                    before = [i for i in ROUTE.layers if i < end]
                    _, slim = model.run(
                        model.embed(tokens[start:stop]), [*before, end], blocks, capture=(end,), stitches=made
                    )
                    rows = torch.arange(start, stop) >= 1  # the very first position is a sink
                    moments.add(slim[end][0][rows], full[end][0, start:stop][rows])
        weight, shift = moments.solve(0.01)
        torch.testing.assert_close(maps[end].factors[0], weight.float(), atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(maps[end].shift, shift.float(), atol=2e-2, rtol=2e-3)
        made[end] = maps[end]
        assert fits[len(made) - 1].rows == moments.rows


def test_stitches_bring_the_slim_path_nearer_on_text_not_fitted_on() -> None:
    model = pair_of("llama").target
    maps, fits = fit_stitches(model, ROUTE, text(120), block=BLOCK)
    scorer = Scorer(model, text(20, seed=9), block=BLOCK)
    raw, stitched = scorer.score(ROUTE), scorer.score(replace(ROUTE, stitches=maps))
    assert stitched.kl < 0.7 * raw.kl
    assert stitched.agreement > raw.agreement
    assert all(f.error_after < f.error_before for f in fits)
    thin, _ = fit_stitches(model, ROUTE, text(120), block=BLOCK, rank=4)
    assert {i: s.rank for i, s in thin.items()} == {3: 4, 6: 4}
    assert stitched.kl < scorer.score(replace(ROUTE, stitches=thin)).kl < raw.kl


def test_a_stitch_over_layers_that_do_nothing_does_nothing() -> None:
    model = tiny_model()
    with torch.no_grad():
        for layer in (2, 4, 5):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    maps, fits = fit_stitches(viasd.make_pair(model, byte_tokenizer()).target, ROUTE, PASSAGES)
    for stitch in maps.values():
        assert stitch.factors[0].abs().max() < 1e-4
        assert stitch.shift.abs().max() < 1e-4
    assert all(f.error_before < 1e-8 for f in fits)


def test_sinks_are_left_out_of_the_fit() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[77] *= 300  # a token whose states are huge
    target = viasd.make_pair(model, byte_tokenizer()).target
    clean = [Passage(tuple(t for t in p.tokens if t != 77), p.first) for p in PASSAGES]
    dirty = [*clean, Passage((*clean[0].tokens[:10], 77, 77, 77, 5), 9)]
    _, fits = fit_stitches(target, ROUTE, dirty)
    firsts = sum(p.first == 1 for p in dirty)
    assert [f.sinks for f in fits] == [firsts + 3] * 2
    assert fits[0].rows + fits[0].sinks == sum(p.scored for p in dirty)


def test_what_can_not_be_fitted_is_refused() -> None:
    model = pair_of("llama").target
    with pytest.raises(OptionError, match="only whole layers"):
        fit_stitches(model, Route((True, False, True, True, True, True, True, True), ((1, "mlp"),)), PASSAGES)
    with pytest.raises(OptionError, match="skips no layer"):
        fit_stitches(model, Route.full(8), PASSAGES)
    with pytest.raises(FitError, match="has 20 scored tokens, but an affine map of states of width 32"):
        fit_stitches(model, ROUTE, [Passage(tuple(range(3, 24)), 1)])
    broken = tiny_model()
    with torch.no_grad():
        broken.model.layers[3].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(FitError, match="layers 4 to 5: the hidden states to fit on hold NaN"):
        fit_stitches(LayeredModel(broken), ROUTE, PASSAGES)  # not by way of the probe, which would refuse it
