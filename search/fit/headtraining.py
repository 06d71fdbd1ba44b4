"""Training light heads: what the target says at its end, taught to one matrix per exit.

The loss is KL(final row || head row), summed over the head's shortlist with the final row's own probabilities there: mass
that the target puts on other words can't be learnt and does not count. The probes learn beside it whether the head's best
token is the target's. The target itself is frozen; its hidden states and rows are made on the fly and thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, linear

from viasd.attention import Segment
from viasd.estimator import EstimatorConfig, LogisticEstimator, logit_of_max
from viasd.heads import unit
from viasd.layered import LayeredModel
from viasd.search.fit.corpus import Batch, Corpus

_ROWS = 256  # positions whose rows over the whole vocabulary exist at one time
_CALIBRATION_STEPS = 24  # damped Newton steps over the same rows; they have long converged by then
#: Thresholds at which the acceptance of exits is reported.
THRESHOLDS = (0.5, 0.75, 0.9)


def shortlist_of(corpus: Corpus, numbers: Sequence[int], size: int) -> Tensor:
    """The most frequent tokens of some conversations, at most `size`, as ascending ids ``[m]``."""
    tokens = torch.cat([corpus.conversation(n) for n in numbers]).long()
    counts = tokens.bincount()
    common = counts.argsort(descending=True, stable=True)[:size]
    return common[counts[common] > 0].sort().values


@dataclass(frozen=True)
class Lesson:
    """What heads learn from: the target at some positions.

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
    def lesson(self, batch: Batch) -> Lesson | None:
        """What the target shows along a batch, at its scored positions; None where none is scored."""
        model, lengths = self._model, batch.length.tolist()
        texts = [batch.ids[i, :n] for i, n in enumerate(lengths)]
        wanted = torch.cat([batch.scored[i, :n] for i, n in enumerate(lengths)]).to(model.device)
        if not bool(wanted.any()):
            return None
        step = model.step([Segment(model.new_kv(), 0, n) for n in lengths])
        final, captured = model.run(
            model.embed(torch.cat(texts)), range(model.n_layers), step, capture=[e for e in self.exits]
        )
        rows, best, entropy = [], [], []
        for chunk in final[:, wanted].split(_ROWS, dim=1):
            logits = model.readout(chunk)
            logp = torch.log_softmax(logits, dim=-1)[:, self.shortlist]
            rows.append(logp.exp())
            best.append(self._places[logits.argmax(dim=-1)])
            entropy.append(-(rows[-1] * logp).sum(-1))
        states = torch.stack([captured[e][0, wanted] for e in self.exits])
        return Lesson(states, torch.cat(rows), torch.cat(best), torch.cat(entropy))

    def logits(self, index: int, states: Tensor) -> Tensor:
        """Raw logits over the shortlist, ``[n, m]``, of exit number `index` for hidden states ``[n, d]`` there."""
        turn = self.transforms[index].to(states.dtype)
        return self._model.readout(states[None], lambda normed: self._head(linear(normed, turn)))

    def promise(self, index: int, states: Tensor) -> Tensor:
        """The probe's logit ``[n]``."""
        probe = self.probes[index]
        return unit(states.float()) @ probe[:-1] + probe[-1]

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Mean losses per exit: KL to the final row in nats ``[exits]``, and log-loss of the probes ``[exits]``."""
        kl, probe = [], []
        for index, states in enumerate(lesson.states):
            logp = torch.log_softmax(self.logits(index, states), dim=-1)
            kl.append((-(lesson.rows * logp).sum(-1) - lesson.entropy).mean())
            right = (logp.detach().argmax(dim=-1) == lesson.best).float()
            probe.append(binary_cross_entropy_with_logits(self.promise(index, states), right))
        return torch.stack(kl), torch.stack(probe)


@dataclass(frozen=True)
class Examination:
    """Heads on text they have not seen.

    Attributes:
        tokens: Positions.
        figures: Per exit: ``agreement`` (same argmax), ``accept_mass`` (sum min(head, target) at temperature 1), ``kl``,
            and per threshold of `THRESHOLDS` ``exit_share`` and ``exit_agreement``: how many positions would exit, and how
            often rightly at temperature 0.
        calibration: State of an estimator (`viasd.estimator`) of the agreement from the row's largest probability, one
            position an exit; fitted on this very text.
    """

    tokens: int
    figures: tuple[dict[str, float], ...]
    calibration: dict[str, object]


@torch.no_grad()
def examine(stack: HeadStack, batches: Sequence[Batch]) -> Examination:
    """Heads along some batches; of at least one scored position."""
    sums: list[dict[str, float]] = [{} for _ in stack.exits]
    features: list[list[Tensor]] = [[] for _ in stack.exits]
    labels: list[list[Tensor]] = [[] for _ in stack.exits]
    tokens = 0
    for batch in batches:
        lesson = stack.lesson(batch)
        if lesson is None:
            continue
        tokens += len(lesson.best)
        for index, states in enumerate(lesson.states):
            logits = stack.logits(index, states)
            logp = torch.log_softmax(logits, dim=-1)
            right = (logp.argmax(dim=-1) == lesson.best).double()
            surest = logp.amax(dim=-1).exp()
            found = {
                "agreement": right.sum(),
                "accept_mass": torch.minimum(logp.exp(), lesson.rows).sum(),
                "kl": (-(lesson.rows * logp).sum(-1) - lesson.entropy).sum(),
            }
            for threshold in THRESHOLDS:
                found[f"exit_share@{threshold:g}"] = (surest > threshold).sum()
                found[f"exit_agreement@{threshold:g}"] = right[surest > threshold].sum()
            for name, value in found.items():
                sums[index][name] = sums[index].get(name, 0.0) + float(value)
            features[index].append(logit_of_max(logits))
            labels[index].append(right)
    estimator = LogisticEstimator(EstimatorConfig(positions=len(stack.exits)))
    f = [torch.cat(rows).double().numpy() for rows in features]
    y = [torch.cat(rows).numpy() for rows in labels]
    for _ in range(_CALIBRATION_STEPS):
        for index in range(len(stack.exits)):
            estimator.observe(f[index][:, None], [index] * len(f[index]), y[index])
        estimator.refit()
    return Examination(tokens, tuple(_figures(s, tokens) for s in sums), estimator.state())


def _figures(sums: dict[str, float], tokens: int) -> dict[str, float]:
    figures = {}
    for name, value in sums.items():
        kind, _, threshold = name.partition("@")
        of = sums[f"exit_share@{threshold}"] if kind == "exit_agreement" else tokens
        figures[name] = value / of if of else 0.0
    return figures
