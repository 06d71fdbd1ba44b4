"""Fine-tuning of the slim path: its stitches, and thin adapters before the layers it keeps, towards q's own rows.

The closed form makes hidden states alike; what counts is what the readout makes of them. Here ``KL(q || q')`` is minimised
by gradient descent through the slim path as it decodes: blocks above the full path's keys. The target's weights stay as
they are, and what is trained is switched on in the slim pass alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from viasd.attention import Segment
from viasd.errors import OptionError
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.search.calibration import Passage
from viasd.search.scorer import BlockStep, Placed
from viasd.stitch import Stitch

RANK = 16
LEARNING_RATE = 1e-4
BATCH = 1024
_ROWS = 128  # positions whose rows over the vocabulary exist in fp32 at one time


class SlimPath(nn.Module):
    """What is trained of a slim path, and its loss.

    Args:
        model: The target, in float32 or bfloat16; its parameters get no gradient.
        route: Layers of the slim path, with the stitches to start from.
        rank: Of the adapters before kept layers (and the readout) that have no stitch; 0 makes none.
        block: Block length, gamma + 1.
        seed: Of the adapters' start.

    Raises:
        OptionError: If the route has no stitches, or the rank is below 0.
    """

    def __init__(self, model: LayeredModel, route: Route, *, rank: int = RANK, block: int = 6, seed: int = 0) -> None:
        super().__init__()
        if not route.stitches:
            raise OptionError("fine-tuning starts from stitches in closed form, but the mask has none; fit them first")
        if rank < 0:
            raise OptionError(f"the adapters' rank must be at least 0, but got {rank}")
        # Not a submodule: what belongs to the target is not trained.
        self._target = (model,)
        self._route = route
        self._block = block
        generator = torch.Generator().manual_seed(seed)
        width = next(iter(route.stitches.values())).width
        made: dict[int, nn.Module] = {i: _Trained(stitch, model.device) for i, stitch in route.stitches.items()}
        for index in (*route.layers, model.n_layers):
            if rank and index > route.first_gap and index not in made:
                down = torch.randn((width, rank), generator=generator) / width**0.5
                made[index] = _Trained(Stitch((down, torch.zeros(rank, width)), torch.zeros(width)), model.device)
        self.trained = nn.ModuleDict({str(index): module for index, module in sorted(made.items())})

    def stitches(self) -> dict[int, Stitch]:
        """What has been learnt, in the model's dtype."""
        dtype = self._target[0].dtype
        trained = {int(index): module for index, module in self.trained.items() if isinstance(module, _Trained)}
        return {index: module.stitch().to(dtype) for index, module in trained.items()}

    def forward(self, passages: Sequence[Passage]) -> Tensor:
        """Mean ``KL(q || q')`` in nats over the scored tokens of some passages, a scalar to take the gradient of."""
        model, route = self._target[0], self._route
        placed = [Placed(model.new_kv(), p.first - 1, p.scored, len(p.tokens) - 1) for p in passages]
        with torch.no_grad():
            step = model.step([Segment(p.kv, 0, p.end) for p in placed])
            hidden = model.embed([t for p in passages for t in p.tokens[:-1]])
            first = route.first_gap
            final, captured = model.run(hidden, range(model.n_layers), step, capture=(first,))
            ends = torch.tensor([p.end for p in placed]).cumsum(0).tolist()
            scored = torch.cat([torch.arange(end - p.length, end) for end, p in zip(ends, placed, strict=True)])
            start, full = captured[first][:, scored.to(model.device)], final[:, scored.to(final.device)]
        layers = [i for i in route.layers if i >= first]
        blocks = BlockStep(placed, self._block, model.device, model.kernel)
        trained = {int(index): module for index, module in self.trained.items()}
        slim, _ = model.run(start, layers, blocks, stitches=trained)
        return self._divergence(slim, full)

    def _divergence(self, slim: Tensor, full: Tensor) -> Tensor:
        """The readout in pieces. Of each only its gradient is kept: all rows over the vocabulary would not fit at once."""
        model, n = self._target[0], slim.shape[1]
        leaf = slim.detach().requires_grad_(slim.requires_grad)
        total = 0.0
        for mine, theirs in zip(leaf.split(_ROWS, dim=1), full.split(_ROWS, dim=1), strict=True):
            logits = model.readout(mine)
            with torch.no_grad():
                wanted = torch.log_softmax(model.readout(theirs), dim=-1)
                found = torch.log_softmax(logits, dim=-1)
                q = wanted.exp()
                total += float(torch.linalg.vecdot(q, wanted.sub_(found)).sum()) / n
                slope = found.exp_().sub_(q).div_(n)
            if slim.requires_grad:
                logits.backward(slope)
        value = torch.tensor(total, device=slim.device)
        if leaf.grad is None:
            return value
        # A number with the value of the loss and the gradient that has just been found.
        carried = (slim * leaf.grad).sum(dtype=torch.float32)
        return carried + (value - carried).detach()


class _Trained(nn.Module):
    """A stitch in fp32 whose numbers are trained."""

    def __init__(self, stitch: Stitch, device: torch.device) -> None:
        super().__init__()
        own = stitch.to(torch.float32)  # a copy: what it starts from stays as it is
        self.factors = nn.ParameterList(nn.Parameter(f.to(device)) for f in own.factors)
        self.shift = nn.Parameter(own.shift.to(device))

    def forward(self, hidden: Tensor) -> Tensor:
        """As `Stitch`, in the dtype of the hidden states."""
        added = hidden
        for factor in self.factors:
            added = added @ factor.to(hidden)
        return hidden + added + self.shift.to(hidden)

    def stitch(self) -> Stitch:
        """What has been learnt."""
        return Stitch(tuple(f.detach() for f in self.factors), self.shift.detach())
