"""A mask's stitches from beginning to end: fitted, perhaps fine-tuned, and judged on conversations kept back."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from viasd.errors import FitError, OptionError
from viasd.files import cache_folder, make_folder
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.search.calibration import Passage
from viasd.search.fit.corpus import Batch, Corpus
from viasd.search.fit.ridge import RIDGE
from viasd.search.fit.sweep import GapFit, fit_stitches
from viasd.search.fit.training import Training, TrainingConfig, train
from viasd.search.fit.tune import BATCH, LEARNING_RATE, RANK, SlimPath
from viasd.stitches import Stitches

TOKENS = 50_000
EXAM_TOKENS = 8192
_CLOSED = "closed.safetensors"

#: Receives a stage, what is done of it, all of it, and figures to show.
Tell = Callable[[str, int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class StitchConfig:
    """How to stitch a mask.

    Attributes:
        gamma: Drafted tokens a block: the slim path is fitted in blocks of gamma + 1, as it decodes.
        tokens: Answer tokens to fit the closed form on, at most.
        ridge: Penalty of the closed form, see `viasd.search.fit.ridge.Moments.solve`.
        rank: Largest rank of a stitch; None leaves them whole.
        steps: Steps of fine-tuning; 0 is the closed form alone.
        adapters: Rank of the adapters that fine-tuning adds; 0 adds none.
        lr: Largest learning rate of fine-tuning.
        batch: Tokens a step.
        minutes: Stop fine-tuning after so long; None never does.
        exam: Answer tokens kept back to judge on, at most.
        seed: Of everything random.
    """

    gamma: int = 5
    tokens: int = TOKENS
    ridge: float = RIDGE
    rank: int | None = None
    steps: int = 0
    adapters: int = RANK
    lr: float = LEARNING_RATE
    batch: int = BATCH
    minutes: float | None = None
    exam: int = EXAM_TOKENS
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"gamma": 1, "tokens": 1, "steps": 0, "adapters": 0, "batch": 16, "exam": 256}
        for name, bound in (least if self.rank is None else {**least, "rank": 1}).items():
            if getattr(self, name) < bound:
                raise OptionError(f"{name} must be at least {bound}, but got {getattr(self, name)}")
        if not 0 <= self.ridge < math.inf:
            raise OptionError(f"ridge must be at least 0, but got {self.ridge:g}")
        if self.steps:
            self.schedule()

    def schedule(self) -> TrainingConfig:
        """Of the fine-tuning. Nothing is drawn to 0: stitches don't begin there."""
        return TrainingConfig(self.steps, lr=self.lr, weight_decay=0.0, seed=self.seed, minutes=self.minutes)


@dataclass(frozen=True)
class Stitched:
    """A mask with its stitches.

    Attributes:
        closed: Stitches in closed form.
        best: The fine-tuned ones, or `closed` where nothing was tuned.
        fits: How well each gap was fitted.
        training: How far fine-tuning got; None where none was asked for.
    """

    closed: Stitches
    best: Stitches
    fits: tuple[GapFit, ...]
    training: Training | None


def stitch_mask(
    pair: Pair,
    mask: LayerMask,
    corpus: Corpus,
    config: StitchConfig,
    work: Path | None = None,
    tell: Tell = lambda stage, done, of, figures: None,
) -> Stitched:
    """Fits a mask's stitches on the conversations of a corpus that are for learning.

    What takes long is kept in the work folder: the closed form when it is done, a checkpoint of the fine-tuning now and
    then. The same call goes on from there.

    Args:
        pair: Its target is what is stitched.
        mask: The mask; stitches that it has are replaced.
        corpus: Text of the target's own.
        config: How.
        work: Folder for what is kept; None is one in the cache folder.
        tell: Told how far it is.

    Raises:
        FitError: If the corpus is too small, or does not determine the maps, or the training fails.
        OptionError: If the mask has nothing that can be stitched.
    """
    learn, _ = corpus.split()
    target = ModelIdentity.of(pair.target, pair.target_id)
    route = replace(mask, stitches=None).route
    text = passages_of(corpus, learn, config.tokens, pair.target.context_length)
    block = config.gamma + 1
    said = {
        "target": asdict(target),
        "dtype": pair.dtype,
        "keep": mask.keep,
        "corpus": corpus.hash,
        "fit": [block, config.tokens, config.ridge, config.rank],
    }
    folder = (cache_folder() / "fits" / f"stitches-{_digest(said)}") if work is None else work
    make_folder(folder, FitError)
    details: dict[str, Any] = {
        "corpus": corpus.hash,
        "tokens": sum(p.scored for p in text),
        "block": block,
        "ridge": config.ridge,
        "rank": config.rank,
        "dtype": pair.dtype,
    }
    closed = _kept(folder / _CLOSED, {**said, "target": None})
    if closed is None:

        def progress(done: int, of: int) -> None:
            tell("closed form, layers", done, of, {})

        maps, fits = fit_stitches(
            pair.target, route, text, block=block, ridge=config.ridge, rank=config.rank, tell=progress
        )
        details["gaps"] = [asdict(fit) for fit in fits]
        closed = Stitches(maps, target, mask.keep, details)
        replace(closed, details={**details, "said": {**said, "target": None}}).save(folder / _CLOSED)
    else:
        details = {k: v for k, v in closed.details.items() if k != "said"}
        closed = replace(closed, details=details, file=None)
    fits = [GapFit(**fit) for fit in details["gaps"]]
    if not config.steps:
        return Stitched(closed, closed, tuple(fits), None)
    path = SlimPath(
        pair.target, replace(route, stitches=closed.maps), rank=config.adapters, block=block, seed=config.seed
    )
    made = corpus.batches(learn, config.batch, seed=config.seed, max_length=pair.target.context_length)
    batches = [rows for rows in map(_passages, made) if rows]

    def shown(training: Training) -> None:
        tell("fine-tuning", training.step, training.of, {"KL": training.loss})

    identity = _digest({**said, "tune": [config.adapters, config.batch, config.seed]})
    with _frozen(pair.target):
        training = train(
            path,
            lambda step: (path(batches[step % len(batches)]), {}),
            config.schedule(),
            folder / f"tune-{identity}",
            identity,
            shown,
        )
    tuned = {
        "adapters": config.adapters,
        "steps": training.step,
        "of": training.of,
        "lr": config.lr,
        "batch": config.batch,
        "kl": round(training.loss, 5),
        "seconds": round(training.seconds),
    }
    return Stitched(
        closed, Stitches(path.stitches(), target, mask.keep, {**details, "tuned": tuned}), tuple(fits), training
    )


def passages_of(corpus: Corpus, numbers: Sequence[int], tokens: int, context: int) -> list[Passage]:
    """Conversations whose answers have about so many tokens together, each cut to the model's context.

    They are taken evenly from all that are named: a corpus may be sorted.
    """
    total = sum(min(int(corpus.start[n + 1] - corpus.start[n]), context) - int(corpus.answer[n]) for n in numbers)
    wanted = min(len(numbers), math.ceil(len(numbers) * tokens / max(total, 1)))
    chosen = [numbers[i * len(numbers) // wanted] for i in range(wanted)]
    return [p for n in chosen for p in _passages(corpus.batch([n], context))]


def halves_of(passages: Sequence[Passage]) -> tuple[list[Passage], list[Passage]]:
    """Passages in two halves of about as many scored tokens."""
    halves: tuple[list[Passage], list[Passage]] = ([], [])
    sizes = [0, 0]
    for passage in passages:
        half = sizes.index(min(sizes))
        halves[half].append(passage)
        sizes[half] += passage.scored
    return halves


def _passages(batch: Batch) -> list[Passage]:
    """The rows of a batch that have anything to score; no cut conversation has its answer beyond its end."""
    rows = zip(batch.ids.tolist(), batch.length.tolist(), batch.answer.tolist(), strict=True)
    return [Passage(tuple(ids[:length]), answer) for ids, length, answer in rows if 1 <= answer < length]


def _kept(path: Path, said: Mapping[str, Any]) -> Stitches | None:
    """The closed form that an interrupted call left, if it is of the very same."""
    if not path.exists():
        return None
    kept = Stitches.load(path)
    return kept if kept.details.get("said") == json.loads(json.dumps(said)) else None


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def _frozen(model: LayeredModel) -> Iterator[None]:
    """The target's own parameters ask for no gradient meanwhile."""
    asking = [p for p in model.model.parameters() if p.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
