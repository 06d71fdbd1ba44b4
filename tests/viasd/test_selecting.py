"""The confident readout on models: against transformers' own hidden states, norm and head."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny import model_of, prompt_ids

from viasd.attention import Segment
from viasd.confident import METHODS, ConfidentConfig, select
from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.probe import load_layered
from viasd.selecting import ConfidentReadout, entropy
from viasd.testing import FAMILIES, tiny_model

ANY = -1
IDS = prompt_ids()


def states(model: LayeredModel, readout: ConfidentReadout, ids: list[int] = IDS) -> tuple[torch.Tensor, dict[int, Any]]:
    """Hidden states after the last layer, and those that the readout asks for."""
    step = model.step([Segment(model.new_kv(), 0, len(ids))])
    return model.run(model.embed(ids), readout.layers, step, capture=readout.capture)


def everything(config: ConfidentConfig, model: LayeredModel, seed: int = 0) -> ConfidentReadout:
    return ConfidentReadout(model, config, range(model.n_layers), seed)


def reference(hf: Any, ids: list[int] = IDS) -> torch.Tensor:
    """Logits ``[layers, n, V]`` after every layer, by transformers' own modules; the last ones are its own forward's."""
    found: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda _, __, out: found.append(_first(out))) for layer in hf.model.layers]
    with torch.no_grad():
        own = hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
        softcap = getattr(hf.config, "final_logit_softcapping", None)
        rows = [hf.lm_head(hf.model.norm(h))[0].float() for h in found]
        if softcap:
            rows = [torch.tanh(row / softcap) * softcap for row in rows]
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(rows[-1], own)
    return torch.stack(rows)


def _first(out: Any) -> torch.Tensor:
    first: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return first


def by_hand(logits: torch.Tensor) -> torch.Tensor:
    """The spec's formula, in float64: logsumexp(z) - sum softmax(z) z."""
    z = logits.double()
    return torch.logsumexp(z, -1) - (torch.softmax(z, -1) * z).sum(-1)


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0, 60.0])
def test_entropy_is_that_of_the_law_in_nats(spread: float) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)) * spread
    torch.testing.assert_close(entropy(logits).double(), by_hand(logits), rtol=1e-5, atol=2e-6)
    assert entropy(logits).dtype == torch.float32
    assert entropy(torch.zeros(1, 64)).item() == pytest.approx(math.log(64))
    assert entropy(torch.tensor([[0.0, -math.inf, 0.0]])).item() == pytest.approx(math.log(2))
    assert math.isnan(entropy(torch.tensor([[0.0, math.nan, 0.0]])).item())


def test_a_rows_entropy_does_not_depend_on_the_others() -> None:
    logits = torch.randn(33, 50000, generator=torch.Generator().manual_seed(1)) * 5
    together = entropy(logits)
    for n in (1, 2, 6):
        assert torch.equal(entropy(logits[:n]), together[:n])


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *((family, "auto") for family in sorted(FAMILIES)),
        *((f, form) for f in ("llama", "gemma2") for form in ("hf", "fused")),
    ],
)
@torch.inference_mode()
def test_rows_are_transformers_own_after_the_layer_where_entropy_is_least(family: str, form: str) -> None:
    hf = model_of(family)
    layered = load_layered(hf if form != "fused" else tiny_model(family), layers=form)
    with torch.inference_mode(mode=False):
        truth = reference(hf)
    entropies = by_hand(truth)
    for steps in (1, 3, 7):
        readout = everything(ConfidentConfig(max_backtrack_layers=steps), layered)
        chosen = readout(*states(layered, readout), 0)
        assert len(readout.capture) == steps
        expected = [select(entropies[-1 - steps :, i].tolist(), steps) + 7 - steps for i in range(len(IDS))]
        assert chosen.layers == expected
        assert chosen.depths == [7 - layer for layer in expected]
        rows = torch.stack([truth[layer, i] for i, layer in enumerate(expected)])
        torch.testing.assert_close(chosen.logits, rows, rtol=1e-3, atol=1e-3)
    assert len(set(expected)) > 1  # else this would say nothing


@torch.inference_mode()
def test_a_softcap_comes_before_the_entropy_and_changes_its_order() -> None:
    layers = {}
    for cap in (None, 2.0):
        hf = tiny_model("gemma2", final_logit_softcapping=cap)
        layered = load_layered(hf)
        readout = everything(ConfidentConfig(max_backtrack_layers=ANY), layered)
        layers[cap] = readout(*states(layered, readout), 0).layers
        with torch.inference_mode(mode=False):
            entropies = by_hand(reference(hf))
        assert layers[cap] == [select(entropies[:, i].tolist(), ANY) for i in range(len(IDS))]
    assert layers[None] != layers[2.0]


@pytest.mark.parametrize("form", ["hf", "fused", "auto"])
@torch.inference_mode()
def test_with_p_0_the_last_layers_very_tensor_is_handed_on(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layered = load_layered(tiny_model("gemma2"), layers=form)
    handed: list[torch.Tensor] = []
    own = LayeredModel.readout

    def watched(self: LayeredModel, *rest: Any) -> torch.Tensor:
        handed.append(own(self, *rest))
        return handed[-1]

    for config in (
        ConfidentConfig(p=0.0),
        ConfidentConfig(max_backtrack_layers=0),
        ConfidentConfig(reference_compat=True),
    ):
        readout = everything(config, layered)
        assert readout.capture == ()
        last, captured = states(layered, readout)
        expected = layered.readout(last)
        with monkeypatch.context() as patch:
            patch.setattr(LayeredModel, "readout", watched)
            chosen = readout(last, captured, 0)
        assert chosen.logits is handed.pop()
        assert handed == []
        assert torch.equal(chosen.logits, expected)
        assert set(chosen.layers) == {7}


@pytest.mark.parametrize("method", METHODS)
@torch.inference_mode()
def test_rows_alone_and_together_are_the_same(method: str) -> None:
    layered = load_layered(model_of("llama", num_hidden_layers=10))
    for p in (1.0, 0.6):
        readout = everything(ConfidentConfig(method, p=p), layered, seed=3)
        last, captured = states(layered, readout)
        together = readout(last, captured, 100)
        for i in range(len(IDS)):
            one = readout(last[:, i : i + 1], {k: h[:, i : i + 1] for k, h in captured.items()}, 100 + i)
            assert one.layers == together.layers[i : i + 1]
            torch.testing.assert_close(one.logits, together.logits[i : i + 1], rtol=1e-5, atol=1e-5)
        if p == 1 and readout.config.fixed:
            assert set(together.depths) == {readout.config.fixed}


@torch.inference_mode()
def test_shifted_methods_hand_on_the_row_of_the_shifted_layer() -> None:
    hf = model_of("llama")
    layered = load_layered(hf)
    with torch.inference_mode(mode=False):
        truth = reference(hf)
    valley = everything(ConfidentConfig(max_backtrack_layers=3), layered)
    depths = valley(*states(layered, valley), 0).depths
    assert {0, 3} < set(depths) or len(set(depths)) > 2
    for method, shift in (("trough-m1", 1), ("trough-m2", 2), ("trough-p1", -1), ("trough-p2", -2)):
        readout = everything(ConfidentConfig(method, max_backtrack_layers=3), layered)
        chosen = readout(*states(layered, readout), 0)
        assert chosen.depths == [min(3, max(0, depth + shift)) for depth in depths]
        rows = torch.stack([truth[7 - depth, i] for i, depth in enumerate(chosen.depths)])
        torch.testing.assert_close(chosen.logits, rows, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_only_what_decides_is_read_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layered = load_layered(model_of("gemma2"))
    readout = everything(ConfidentConfig(max_backtrack_layers=ANY), layered)
    last, captured = states(layered, readout)
    depths = readout(last, captured, 0).depths
    sizes: list[int] = []
    own = LayeredModel.readout
    monkeypatch.setattr(LayeredModel, "readout", lambda self, h: sizes.append(h.shape[1]) or own(self, h))
    for n in (6, len(IDS)):
        sizes.clear()
        chosen = readout(last[:, :n], {k: h[:, :n] for k, h in captured.items()}, 0)
        descending = [sum(depth >= d for depth in depths[:n]) for d in range(1, 7)]
        pair = [2 * n] if 2 * n <= 32 else [n, n]  # both in one call where the kernels take them in one
        assert sizes == pair + [k for k in descending if k]
        assert chosen.read == sum(sizes)
    sizes.clear()
    fixed = everything(ConfidentConfig("last-m2"), layered)
    fixed(last, captured, 0)
    assert sizes == [len(IDS)]


@torch.inference_mode()
def test_nan_in_a_shallow_layer_stops_there_and_in_the_last_one_is_handed_on() -> None:
    layered = load_layered(model_of("llama"))
    readout = everything(ConfidentConfig(max_backtrack_layers=ANY), layered)
    last, captured = states(layered, readout)
    before = readout(last, captured, 0)
    row = next(i for i, depth in enumerate(before.depths) if depth == 2)
    spoilt = {k: h.clone() for k, h in captured.items()}
    spoilt[readout.capture[1]][:, row] = math.nan  # two layers before the last
    after = readout(last, spoilt, 0)
    assert after.depths[row] == 1
    assert [d for i, d in enumerate(after.depths) if i != row] == [d for i, d in enumerate(before.depths) if i != row]
    broken = last.clone()
    broken[:, row] = math.nan
    found = readout(broken, captured, 0)
    assert found.depths[row] == 0
    assert found.logits[row].isnan().all()


@torch.inference_mode()
def test_coins_move_tokens_at_rate_p_and_leave_the_others_as_they_are() -> None:
    layered = load_layered(model_of("llama"))
    moving = everything(ConfidentConfig("last-m1"), layered)
    last, captured = states(layered, moving)
    plain, moved = layered.readout(last), moving(last, captured, 0)
    tossed = 0
    for seed in range(60):
        mixed = everything(ConfidentConfig("last-m1", p=0.25), layered, seed)(last, captured, 0)
        tossed += sum(mixed.depths)
        rows = [moved.logits[i] if depth else plain[i] for i, depth in enumerate(mixed.depths)]
        torch.testing.assert_close(mixed.logits, torch.stack(rows), rtol=1e-5, atol=1e-5)
    n = 60 * len(IDS)
    assert abs(tossed / n - 0.25) < 4 * math.sqrt(0.25 * 0.75 / n)


def test_a_fixed_layer_outside_the_window_is_an_error_when_the_readout_is_made() -> None:
    layered = load_layered(model_of("llama"))
    with pytest.raises(OptionError, match="readout last-m8 is 8 layers before the last of the 8 that run"):
        everything(ConfidentConfig("last-m8"), layered)
    clamped = everything(ConfidentConfig("last-m8", max_backtrack_layers=3, reference_compat=True), layered)
    assert len(clamped.capture) == 2
