"""One small training loop: interrupted at any moment it goes on where it was, and a broken loss costs nothing."""

from __future__ import annotations

import io
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from viasd.errors import FitError, OptionError
from viasd.files import make_folder, write_atomically

CHECKPOINT = "checkpoint.pt"
_SMOOTHING = 0.98  # of the loss that is shown
Loss = Callable[[int], tuple[Tensor, Mapping[str, float]]]


@dataclass(frozen=True)
class TrainingConfig:
    """How to train.

    Attributes:
        steps: Optimizer steps in all, at least 1.
        lr: Largest learning rate, above 0.
        warmup: Share of the steps over which it rises from 0; it then falls along a half cosine.
        floor: What it falls to, as a share of `lr`.
        weight_decay: Of AdamW, on matrices only.
        clip: Largest norm of the gradient.
        seed: Of the order of the data and of everything random.
        save_every: Seconds between checkpoints.
        minutes: Stop after so many minutes of this call; None never does.
    """

    steps: int
    lr: float = 1e-3
    warmup: float = 0.03
    floor: float = 0.05
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    save_every: float = 60.0
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise OptionError(f"steps must be at least 1, but got {self.steps}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise OptionError(f"the learning rate must be above 0, but got {self.lr}")
        if self.minutes is not None and not self.minutes > 0:
            raise OptionError(f"minutes must be above 0, but got {self.minutes}")

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        rise = max(1, round(self.steps * self.warmup))
        if step < rise:
            return self.lr * (step + 1) / rise
        share = (step - rise) / max(1, self.steps - rise)
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))


@dataclass(frozen=True)
class Training:
    """How far a training got.

    Attributes:
        step: Steps done, by this call and those before it.
        of: Steps wanted.
        loss: Smoothed loss.
        metrics: Smoothed figures of the loss function.
        seconds: Time spent, by this call and those before it.
        ended: ``finished``, ``interrupted`` or ``time limit``.
    """

    step: int
    of: int
    loss: float
    metrics: Mapping[str, float]
    seconds: float
    ended: str = "finished"


def train(
    module: nn.Module,
    loss: Loss,
    config: TrainingConfig,
    folder: Path,
    identity: str,
    tell: Callable[[Training], None] = lambda training: None,
) -> Training:
    """Trains the parameters of `module` that ask for a gradient, from a checkpoint in `folder` on if there is one.

    A checkpoint holds parameters whose loss was seen to be finite, so it stays good whatever happens after it. Ctrl-C ends
    the step at hand and keeps it; a second one ends at once, with the last checkpoint.

    Args:
        module: What is trained, in place.
        loss: Step number (from 0) -> loss, and figures to show. The same number must mean the same data.
        config: How.
        folder: Where checkpoints are kept.
        identity: What is trained on what, as a hash: a checkpoint of another identity is refused. Learning rate and
            number of steps may change.
        tell: Receives the state after every step.

    Raises:
        FitError: If a loss or gradient is not finite, or the checkpoint can't be read or is of something else.
    """
    make_folder(folder, FitError)
    path = folder / CHECKPOINT
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(0.9, 0.95),
        fused=all(p.device.type in ("cpu", "cuda") for p in parameters),
    )
    torch.manual_seed(config.seed)
    seen = _Smooth()
    step, spent = 0, 0.0
    if path.exists():
        step, spent = _resume(path, identity, module, optimizer, seen)
    begun = saved = time.perf_counter()
    ended = "finished"
    with _deferred_interrupt() as interrupted:
        while step < config.steps:
            state = torch.get_rng_state()
            value, figures = loss(step)
            _check_finite(float(value.detach()), "loss", step, path)
            if time.perf_counter() - saved >= config.save_every:
                _save(path, identity, module, optimizer, step, spent + time.perf_counter() - begun, state, seen)
                saved = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            norm = float(nn.utils.clip_grad_norm_(parameters, config.clip))
            _check_finite(norm, "gradient", step, path)
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            optimizer.step()
            step += 1
            seen.add({**figures, "loss": float(value.detach())})
            elapsed = time.perf_counter() - begun
            tell(_state(step, config, seen, spent + elapsed))
            if interrupted.is_set() or (config.minutes is not None and elapsed >= 60 * config.minutes):
                ended = "interrupted" if interrupted.is_set() else "time limit"
                break
        spent += time.perf_counter() - begun
        _save_if_sound(path, identity, module, optimizer, step, spent, seen)
    return _state(step, config, seen, spent, "finished" if step >= config.steps else ended)


class _Smooth:
    """Exponentially smoothed figures, unbiased at their beginning."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.weight = 0.0

    def add(self, figures: Mapping[str, float]) -> None:
        self.weight = _SMOOTHING * self.weight + 1
        self.sums = {name: _SMOOTHING * self.sums.get(name, 0.0) + value for name, value in figures.items()}

    def values(self) -> dict[str, float]:
        return {name: total / self.weight for name, total in self.sums.items()} if self.weight else {}


def _state(step: int, config: TrainingConfig, seen: _Smooth, seconds: float, ended: str = "") -> Training:
    figures = seen.values()
    return Training(step, config.steps, figures.pop("loss", math.nan), figures, seconds, ended)


def _check_finite(value: float, what: str, step: int, path: Path) -> None:
    if math.isfinite(value):
        return
    kept = f"the last good state is in '{path}'" if path.exists() else "nothing had been saved yet"
    raise FitError(
        f"the {what} of step {step + 1} is {value}, expected a finite number; {kept}. Use a smaller --lr: the same command "
        "goes on from there"
    )


def _save_if_sound(
    path: Path, identity: str, module: nn.Module, optimizer: Any, step: int, spent: float, seen: _Smooth
) -> None:
    """The last state, unless its parameters are no numbers: no loss has been seen of it."""
    if all(bool(p.isfinite().all()) for p in module.parameters()):
        _save(path, identity, module, optimizer, step, spent, torch.get_rng_state(), seen)


def _save(
    path: Path,
    identity: str,
    module: nn.Module,
    optimizer: Any,
    step: int,
    spent: float,
    rng: Tensor,
    seen: _Smooth,
) -> None:
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    content = io.BytesIO()
    torch.save(
        {
            "identity": identity,
            "step": step,
            "seconds": spent,
            "parameters": trained,
            "optimizer": optimizer.state_dict(),
            "rng": rng,
            "smooth": [seen.sums, seen.weight],
        },
        content,
    )
    write_atomically(path, content.getvalue(), FitError)


def _resume(path: Path, identity: str, module: nn.Module, optimizer: Any, seen: _Smooth) -> tuple[int, float]:
    advice = f"delete the folder '{path.parent}' or name another one (--work)"
    try:
        kept = torch.load(path, map_location="cpu", weights_only=True)
        said = kept["identity"]
        if said == identity:
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if parameter.requires_grad:
                        parameter.copy_(kept["parameters"][name])
            optimizer.load_state_dict(kept["optimizer"])
            torch.set_rng_state(kept["rng"])
            seen.sums, seen.weight = kept["smooth"]
            return int(kept["step"]), float(kept["seconds"])
    except Exception as error:  # a damaged pickle raises anything
        raise FitError(f"the checkpoint '{path}' can't be read ({type(error).__name__}: {error}); {advice}") from error
    raise FitError(f"the checkpoint '{path}' is of another model or other data than this training; {advice}")


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that no step is cut in half; the second one interrupts at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
