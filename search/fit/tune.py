"""Fine-tuning of the slim path: its stitches, and thin adapters before the layers it keeps, towards q's own rows.

The closed form makes hidden states alike; what counts is what the readout makes of them. Here ``KL(q || q')`` is minimised by
gradient descent through the slim path as it decodes: blocks above the full path's keys. The target's weights stay as they
are, and what is trained is switched on in the slim pass alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from viasd.attention import Segment
from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.scorer import BlockStep, Placed
from viasd.stitch import Stitch

_ROWS = 128  # positions whose rows over the vocabulary exist in fp32 at one time
_WARM_UP = 0.05  # share of the training during which the step size grows


@dataclass(frozen=True)
class TuneConfig:
    """How to fine-tune.

    Attributes:
        rank: Of the adapters before kept layers without a stitch; 0 makes none.
        epochs: Passes over the text; may be a fraction.
        seconds: Time after which training ends, its schedule cut to fit; None for no limit.
        batch: Tokens (scored or not) per step, about.
        step: Largest step of Adam.
        seed: Of the order of the text and the adapters' start.
    """

    rank: int = 16
    epochs: float = 1.0
    seconds: float | None = None
    batch: int = 1024
    step: float = 3e-4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise OptionError(f"the adapters' rank must be at least 0, but got {self.rank}")
        for name in ("epochs", "batch", "step", "seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"{name} must be above 0, but got {value:g}")


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        maps: Stitches and adapters in the model's dtype, by the layer they come before.
        steps: Steps taken.
        tokens: Scored tokens seen.
        first: Mean KL (nats) over the first tenth of the steps.
        last: The same over the last tenth.
    """

    maps: dict[int, Stitch]
    steps: int
    tokens: int
    first: float
    last: float


class _Trained(nn.Module):
    """A stitch in fp32 whose numbers are trained."""

    def __init__(self, stitch: Stitch, device: torch.device) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(f.to(device, torch.float32)) for f in stitch.factors)
        self.shift = nn.Parameter(stitch.shift.to(device, torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """As `Stitch`, in the dtype of the hidden states."""
        added = hidden
        for factor in self.factors:
            added = added @ factor.to(hidden)
        return hidden + added + self.shift.to(hidden)

    def stitch(self) -> Stitch:
        """What has been learnt."""
        return Stitch(tuple(f.detach().cpu() for f in self.factors), self.shift.detach().cpu())


def fine_tune(
    model: LayeredModel,
    route: Route,
    passages: Sequence[Passage],
    config: TuneConfig | None = None,
    *,
    block: int = 6,
    tell: Callable[[float, float], None] = lambda share, loss: None,
) -> Tuned:
    """Trains a route's stitches and new adapters.

    Args:
        model: The target, in float32 or bfloat16.
        route: Layers of the slim path, with the stitches to start from.
        passages: Text; the scored tokens of each passage are trained on.
        config: How.
        block: Block length, gamma + 1.
        tell: Receives the share done and the running KL after every step.

    Raises:
        OptionError: If there are no stitches to start from, or the loss is not a number.
    """
    config = config or TuneConfig()
    if not route.stitches:
        raise OptionError("fine-tuning starts from stitches in closed form, but the mask has none; fit them first")
    generator = torch.Generator().manual_seed(config.seed)
    trained = _modules(model, route, config, generator)
    optimizer = torch.optim.Adam([p for m in trained.values() for p in m.parameters()], lr=config.step)
    batches = _batches(passages, config, generator)
    begun, losses, tokens = time.perf_counter(), list[float](), 0
    for number, batch in enumerate(batches):
        share = number / len(batches)
        if config.seconds is not None:
            share = max(share, (time.perf_counter() - begun) / config.seconds)
            if share >= 1:
                break
        for group in optimizer.param_groups:
            group["lr"] = config.step * min(1.0, share / _WARM_UP + 0.01) * (1 + math.cos(math.pi * share)) / 2
        optimizer.zero_grad(set_to_none=True)
        loss, scored = _backward(model, route, trained, batch, block)
        if not math.isfinite(loss):
            raise OptionError(
                f"the loss of step {number + 1} is not a number; run the target in float32 or bfloat16, or take smaller steps "
                f"than {config.step:g}"
            )
        nn.utils.clip_grad_norm_([p for m in trained.values() for p in m.parameters()], 1.0)
        optimizer.step()
        losses.append(loss)
        tokens += scored
        recent = losses[-20:]
        tell(share, sum(recent) / len(recent))
    tenth = max(1, len(losses) // 10)
    maps = {index: module.stitch().to(model.dtype) for index, module in sorted(trained.items())}
    first, last = (sum(part) / len(part) for part in (losses[:tenth], losses[-tenth:]))
    return Tuned(maps, len(losses), tokens, first, last)


def _modules(model: LayeredModel, route: Route, config: TuneConfig, generator: torch.Generator) -> dict[int, _Trained]:
    """What is trained, by the layer it comes before: the stitches, and adapters that do nothing yet."""
    assert route.stitches
    made = {index: _Trained(stitch, model.device) for index, stitch in route.stitches.items()}
    width = next(iter(route.stitches.values())).width
    for index in (*route.layers, model.n_layers):
        if config.rank and index > route.first_gap and index not in made:
            down = torch.randn((width, config.rank), generator=generator) / width**0.5
            nothing = Stitch((down, torch.zeros(config.rank, width)), torch.zeros(width))
            made[index] = _Trained(nothing, model.device)
    return made


def _batches(passages: Sequence[Passage], config: TuneConfig, generator: torch.Generator) -> list[list[Passage]]:
    wanted = config.epochs * sum(len(p.tokens) for p in passages)
    batches: list[list[Passage]] = [[]]
    size = total = 0
    while total < wanted:
        for index in torch.randperm(len(passages), generator=generator).tolist():
            passage = passages[index]
            if size and size + len(passage.tokens) > config.batch:
                batches.append([])
                size = 0
            batches[-1].append(passage)
            size += len(passage.tokens)
            total += len(passage.tokens)
            if total >= wanted:
                break
    return batches


def _backward(
    model: LayeredModel, route: Route, trained: Mapping[int, _Trained], passages: Sequence[Passage], block: int
) -> tuple[float, int]:
    """Adds the gradients of a batch's mean KL; returns that mean and the number of scored tokens."""
    placed = [Placed(model.new_kv(), p.first - 1, p.scored, len(p.tokens) - 1) for p in passages]
    first = route.first_gap
    with torch.no_grad():
        step = model.step([Segment(p.kv, 0, p.end) for p in placed])
        hidden = model.embed([t for p in passages for t in p.tokens[:-1]])
        final, captured = model.run(hidden, range(model.n_layers), step, capture=(first,))
        ends = torch.tensor([p.end for p in placed]).cumsum(0).tolist()
        scored = torch.cat([torch.arange(end - p.length, end) for end, p in zip(ends, placed, strict=True)])
        start, full = captured[first][:, scored.to(model.device)], final[:, scored.to(final.device)]
    layers = [i for i in route.layers if i >= first]
    slim, _ = model.run(start, layers, BlockStep(placed, block, model.device, model.kernel), stitches=trained)
    # The readout in pieces, its gradient carried on once: rows over the vocabulary never exist all at once.
    leaf = slim.detach().requires_grad_()
    total, n = 0.0, leaf.shape[1]
    for mine, theirs in zip(leaf.split(_ROWS, dim=1), full.split(_ROWS, dim=1), strict=True):
        with torch.no_grad():
            target = torch.log_softmax(model.readout(theirs), dim=-1)
        loss = nn.functional.kl_div(
            torch.log_softmax(model.readout(mine), dim=-1), target, reduction="sum", log_target=True
        )
        (loss / n).backward()
        total += float(loss.detach())
    slim.backward(leaf.grad)
    return total / n, n
