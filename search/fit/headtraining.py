"""Training light heads: what the target says at its end, taught to one matrix per exit.

The loss is KL(final row || head row), summed over the head's shortlist with the final row's own probabilities there: mass that
the target puts on other words can't be learnt and does not count. The probes learn beside it whether the head's best token
is the target's. The target itself is frozen; its hidden states and rows are made on the fly and thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from viasd.attention import Segment
from viasd.heads import unit
from viasd.layered import LayeredModel

#: Positions whose rows over the whole vocabulary exist at one time.
ROWS = 256


@dataclass(frozen=True)
class Lesson:
    """What heads learn from: the target along some text, at the positions that are learnt from.

    Attributes:
        states: Hidden states at each exit, ``[exits, n, d]``.
        rows: The target's own probabilities of the shortlist's words, ``[n, m]``, fp32.
        best: Place of the target's argmax in the shortlist, -1 where it is not in it, ``[n]``.
        entropy: Of the final row over the shortlist, ``-sum q log q``, ``[n]``: the least the loss can be.
    """

    states: Tensor
    rows: Tensor
    best: Tensor
    entropy: Tensor


def observe(
    model: LayeredModel, rows: Sequence[Tensor], scored: Sequence[Tensor], exits: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Runs the target over some texts: hidden states at exits and end, at the scored positions.

    Args:
        model: The target.
        rows: Token ids ``[n_i]`` of each text.
        scored: Boolean ``[n_i]`` of each.
        exits: After how many layers.

    Returns:
        ``[exits, n, d]`` and the final ``[1, n, d]``.
    """
    step = model.step([Segment(model.new_kv(), 0, row.shape[0]) for row in rows])
    final, captured = model.run(model.embed(torch.cat(list(rows))), range(model.n_layers), step, capture=exits)
    wanted = torch.cat(list(scored)).to(final.device)
    return torch.stack([captured[e][0, wanted] for e in exits]), final[:, wanted]


class HeadStack(nn.Module):
    """The heads while they are trained: matrices and probes in fp32, applied in the target's own dtype.

    Args:
        model: The target.
        exits: After how many layers there is a head.
        shortlist: Token ids ``[m]`` that the heads know.
    """

    def __init__(self, model: LayeredModel, exits: Sequence[int], shortlist: Tensor) -> None:
        super().__init__()
        self.exits = tuple(exits)
        self.shortlist = shortlist
        self._model = model
        self._head = model.head_rows(shortlist)
        self._places = torch.full((model.vocabulary,), -1, dtype=torch.long)
        self._places[shortlist] = torch.arange(len(shortlist))
        width = model.config.hidden_size
        self.transforms = nn.Parameter(torch.eye(width).repeat(len(exits), 1, 1))
        self.probes = nn.Parameter(torch.zeros(len(exits), width + 1))

    @torch.no_grad()
    def lesson(self, rows: Sequence[Tensor], scored: Sequence[Tensor]) -> list[Lesson]:
        """What the target shows along some texts, in pieces of at most `ROWS` positions."""
        states, final = observe(self._model, rows, scored, self.exits)
        found = []
        for start in range(0, final.shape[1], ROWS):
            logits = self._model.readout(final[:, start : start + ROWS])
            logp = torch.log_softmax(logits, dim=-1)[:, self.shortlist]
            row = logp.exp()
            found.append(
                Lesson(
                    states[:, start : start + ROWS],
                    row,
                    self._places[logits.argmax(dim=-1)],
                    -(row * logp).sum(-1),
                )
            )
        return found

    def logits(self, exit_index: int, states: Tensor) -> Tensor:
        """A head's raw logits over the shortlist, ``[n, m]``, for hidden states ``[n, d]`` at its exit."""
        turn = self.transforms[exit_index].to(states.dtype)
        return self._model.readout(states[None], lambda normed: self._head(linear(normed, turn)))

    def promise(self, exit_index: int, states: Tensor) -> Tensor:
        """The probe's logit ``[n]``."""
        probe = self.probes[exit_index]
        return unit(states.float()) @ probe[:-1] + probe[-1]

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, summed over positions.

        Returns:
            Per exit ``[exits]``: KL to the final row in nats, the probe's log-loss, and (no gradient) right argmaxes.
        """
        kl, probe, right = [], [], []
        for index, states in enumerate(lesson.states):
            logp = torch.log_softmax(self.logits(index, states), dim=-1)
            kl.append(-(lesson.rows * logp).sum() - lesson.entropy.sum())
            hit = (logp.detach().argmax(dim=-1) == lesson.best).float()
            probe.append(binary_cross_entropy_with_logits(self.promise(index, states), hit, reduction="sum"))
            right.append(hit.sum())
        return torch.stack(kl), torch.stack(probe), torch.stack(right)
