from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import model_of, pair_of, prompt_ids
from torch import Tensor

from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.probe import load_layered
from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.fit import tune
from viasd.search.fit.sweep import fit_stitches
from viasd.search.fit.tune import SlimPath
from viasd.search.scorer import Scorer

ROUTE = Route.of([1, 1, 0, 1, 0, 0, 1, 1])
WORDS = ("hello ", "world ", "again ", "and ", "one two ", "three, ")


def text(n: int) -> list[Passage]:
    return [
        Passage(tuple(prompt_ids("".join(WORDS[(i * 7 + k * (i + 1)) % 6] for k in range(7)))), 1 + i % 5)
        for i in range(n)
    ]


PASSAGES = text(20)


def stitched(model: LayeredModel, rank: int | None = 2) -> Route:
    return replace(ROUTE, stitches=fit_stitches(model, ROUTE, PASSAGES, block=5, rank=rank)[0])


def divergence(model: LayeredModel, route: Route) -> float:
    """Mean KL(q || q') by the scorer's rows."""
    full, slim = (rows_of(model, r) for r in (Route.full(8), route))
    return float((full.exp() * (full - slim)).sum(-1).mean())


def rows_of(model: LayeredModel, route: Route) -> Tensor:
    with torch.inference_mode():
        rows = [block.logits for block in Scorer(model, PASSAGES, block=5).blocks(route)]
        return torch.log_softmax(torch.cat(rows), dim=-1)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_is_the_divergence_of_decodings_own_rows(family: str) -> None:
    model = pair_of(family).target
    route = stitched(model)
    path = SlimPath(model, route, rank=3, block=5)
    assert float(path(PASSAGES).detach()) == pytest.approx(divergence(model, route), rel=1e-3)
    # New adapters do nothing yet, and there is one before every kept layer after the gap and before the readout.
    assert sorted(path.stitches()) == [3, 6, 7, 8]
    assert sorted(SlimPath(model, route, rank=0, block=5).stitches()) == [3, 6]
    with torch.no_grad():
        for module in path.trained.values():
            for parameter in module.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        assert float(path(PASSAGES)) == pytest.approx(
            divergence(model, replace(route, stitches=path.stitches())), rel=1e-3
        )


def test_the_gradient_is_that_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_ROWS", 7)  # in several pieces
    model = pair_of("llama").target
    path = SlimPath(model, stitched(model), rank=2, block=5)
    with torch.no_grad():
        path.trained["7"].factors[1].add_(0.01)  # so that both factors of an adapter count
    path(PASSAGES).backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in path.parameters():
        assert parameter.grad is not None
        way = torch.randn(parameter.shape, generator=generator)
        way /= way.norm()
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                parameter.add_(sign * 1e-2 * way)
                values.append(float(path(PASSAGES)))
                parameter.sub_(sign * 1e-2 * way)
        expected = (values[0] - values[1]) / 2e-2
        assert float((parameter.grad * way).sum()) == pytest.approx(expected, abs=2e-4, rel=0.05)


@pytest.mark.parametrize("layers", ["auto", "hf"])
def test_training_lowers_the_loss_and_leaves_the_target_alone(layers: str) -> None:
    hf = copy.deepcopy(model_of("llama"))
    hf.requires_grad_(False)
    model = load_layered(hf, layers=layers)
    before = copy.deepcopy(hf.state_dict())
    route = stitched(model)
    weights = {i: [f.clone() for f in s.factors] for i, s in (route.stitches or {}).items()}
    path = SlimPath(model, route, rank=2, block=5)
    optimizer = torch.optim.Adam(path.parameters(), lr=1e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = path(PASSAGES)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert divergence(model, replace(route, stitches=path.stitches())) < 0.8 * divergence(model, route)
    for name, tensor in hf.state_dict().items():
        assert torch.equal(tensor, before[name])
    for i, stitch in (route.stitches or {}).items():  # what it started from is not what was trained
        assert all(torch.equal(a, b) for a, b in zip(weights[i], stitch.factors, strict=True))


def test_what_can_not_be_tuned_is_refused() -> None:
    model = pair_of("llama").target
    with pytest.raises(OptionError, match="the mask has none; fit them first"):
        SlimPath(model, ROUTE)
    with pytest.raises(OptionError, match="rank must be at least 0"):
        SlimPath(model, stitched(model), rank=-1)
