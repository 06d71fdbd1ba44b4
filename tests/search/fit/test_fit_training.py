from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from viasd.errors import FitError, OptionError
from viasd.search.fit.training import CHECKPOINT, Training, TrainingConfig, train


def line() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(4, 4)


def noisy(module: nn.Linear, bad: int | None = None) -> object:
    """A loss with randomness of its own; not a number at step `bad`."""

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator) + torch.randn(8, 4)  # the second from the global stream
        value = (module(x) - x).square().mean()
        return (value * float("nan") if step == bad else value), {"size": float(value.detach())}

    return loss


def weights(module: nn.Linear) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_run_in_pieces_ends_where_one_in_one_piece_does(tmp_path: Path) -> None:
    config = TrainingConfig(steps=30, lr=0.05)
    whole, pieces = line(), line()
    one = train(whole, noisy(whole), config, tmp_path / "a", "x")
    stops = iter([7, 19])

    def interrupt(state: Training) -> None:
        if state.step == stop:
            signal.raise_signal(signal.SIGINT)

    for stop in stops:
        torch.manual_seed(99)
        part = train(pieces, noisy(pieces), config, tmp_path / "b", "x", interrupt)
        assert (part.ended, part.step) == ("interrupted", stop)
        pieces = line()
    stop = -1
    last = train(pieces, noisy(pieces), config, tmp_path / "b", "x")
    assert torch.equal(weights(whole), weights(pieces))
    assert (last.ended, last.step) == ("finished", 30)
    assert last.loss == pytest.approx(one.loss, abs=0)
    assert last.metrics == one.metrics


def test_training_gets_somewhere(tmp_path: Path) -> None:
    module = line()
    losses: list[float] = []
    train(module, noisy(module), TrainingConfig(steps=300, lr=0.05), tmp_path, "x", lambda s: losses.append(s.loss))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_loss_that_is_no_number_stops_and_loses_nothing(tmp_path: Path, where: str) -> None:
    module, good = line(), line()

    def root(step: int) -> tuple[Tensor, dict[str, float]]:
        value, figures = noisy(module)(step)  # type: ignore[operator]
        # The square root of 0 is a number, its slope is not.
        return (value + (module.weight * 0).sum().abs().sqrt() if step == 9 else value), figures

    config = TrainingConfig(steps=20, lr=0.05, save_every=0)
    with pytest.raises(FitError, match=f"{where} of step 10 is (nan|inf).*last good state.*smaller --lr"):
        train(module, noisy(module, bad=9) if where == "loss" else root, config, tmp_path, "x")
    train(good, noisy(good), TrainingConfig(steps=20, lr=0.05, minutes=1e-9), tmp_path / "none", "x")
    kept = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    assert kept["step"] in (8, 9)
    assert all(bool(p.isfinite().all()) for p in kept["parameters"].values())
    again = line()
    done = train(again, noisy(again), TrainingConfig(steps=20, lr=0.01), tmp_path, "x")
    assert done.step == 20


def test_a_time_limit_ends_a_call_and_the_next_goes_on(tmp_path: Path) -> None:
    module = line()
    config = TrainingConfig(steps=5, minutes=1e-9)
    assert [train(module, noisy(module), config, tmp_path, "x").step for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_checkpoint_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    module = line()
    train(module, noisy(module), TrainingConfig(steps=2), tmp_path, "x")
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(FitError, match=r"another model or other data.*--work"):
        train(module, noisy(module), TrainingConfig(steps=2), tmp_path, "y")
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    (tmp_path / CHECKPOINT).write_bytes(before[: len(before) // 2])
    with pytest.raises(FitError, match=r"can't be read.*delete"):
        train(module, noisy(module), TrainingConfig(steps=2), tmp_path, "x")


def test_the_rate_rises_then_falls() -> None:
    rates = [TrainingConfig(steps=100, lr=1.0, warmup=0.1, floor=0.1).rate(i) for i in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1, "lr": 0.0}, {"steps": 1, "minutes": 0.0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be"):
        TrainingConfig(**options)  # type: ignore[arg-type]
