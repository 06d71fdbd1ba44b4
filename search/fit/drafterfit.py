"""A drafter of either kind from corpus to file: training, examination, record."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import viasd
from viasd.errors import FitError
from viasd.feature import FeatureDrafterFile, FeatureShape
from viasd.featuremodel import FeatureModel
from viasd.files import cache_folder
from viasd.identity import ModelIdentity
from viasd.pair import Pair
from viasd.runtime.display import Screen
from viasd.search.fit.corpus import Batch, Corpus, load_corpus
from viasd.search.fit.draftexam import decode, examine
from viasd.search.fit.featuretraining import FeatureStack
from viasd.search.fit.headtraining import shortlist_of
from viasd.search.fit.progress import FitProgress
from viasd.search.fit.standalone import StandaloneShape, StandaloneStack, default_inner, drafting_with, save_standalone
from viasd.search.fit.teaching import Teacher
from viasd.search.fit.training import Training, TrainingConfig, train

EXAM_TOKENS = 20_000
PROMPTS = 24  # decoded at temperature 0 to see what is kept


@dataclass(frozen=True)
class FitSettings:
    """What to train and how; see the options of `viasd-fit drafter`."""

    kind: str
    depth: int
    width: int
    inner: int | None
    shortlist: int
    ahead: int
    max_temperature: float | None
    accept_weight: float
    passes: float
    steps: int | None
    minutes: float | None
    batch: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Material:
    """Several corpora as one.

    Attributes:
        corpus: All conversations.
        learn: Numbers of those to learn from.
        held: Of those kept back: the last share of each corpus.
        about: Per corpus its hash and size, for the record.
    """

    corpus: Corpus
    learn: list[int]
    held: list[int]
    about: list[dict[str, Any]]


def read_material(paths: Sequence[str], pair: Pair, max_temperature: float | None = None) -> Material:
    """Reads corpora of a pair's target.

    Args:
        paths: Files.
        pair: The pair.
        max_temperature: Leaves out conversations drawn at a higher one; None takes all.

    Raises:
        FitError: If one can't be read, is of another tokenizer, or has too few conversations; or none is cold enough.
    """
    corpora = [load_corpus(path, pair.tokenizer) for path in paths]
    learn: list[int] = []
    held: list[int] = []
    first = 0
    for corpus in corpora:
        for numbers, into in zip(corpus.split(), (learn, held), strict=True):
            into += [first + n for n in numbers if max_temperature is None or corpus.temperature[n] <= max_temperature]
        first += len(corpus)
    if not learn or not held:
        raise FitError(
            f"expected conversations drawn at temperature {max_temperature:g} or below, to learn from and to judge on, but "
            f"there are {len(learn)} and {len(held)}; raise --max-temperature or give another corpus"
        )
    lengths = torch.cat([corpus.start.diff() for corpus in corpora])
    joined = Corpus(
        torch.cat([corpus.tokens for corpus in corpora]),
        torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        torch.cat([corpus.answer for corpus in corpora]),
        torch.cat([corpus.temperature for corpus in corpora]),
    )
    about = [
        {"hash": c.hash, "conversations": len(c), "answer_tokens": c.answer_tokens, "provenance": dict(c.provenance)}
        for c in corpora
    ]
    return Material(joined, learn, held, about)


def fit_drafter(
    pair: Pair,
    settings: FitSettings,
    corpora: Sequence[str],
    output: str,
    work: str | None,
    said: dict[str, Any],
    screen: Screen,
) -> tuple[dict[str, Any] | None, Training]:
    """Trains a drafter, examines it, and writes it with its record.

    Args:
        pair: Its target is learnt from.
        settings: What and how.
        corpora: Files.
        output: Where it goes.
        work: Folder for checkpoints and hidden states; None takes the cache folder.
        said: The options, for the record.
        screen: Where progress is shown.

    Returns:
        The record, None where Ctrl-C ended the training; and how far that got.

    Raises:
        ViasdError: If a corpus is unfit, the training fails, or something can't be written.
    """
    model = pair.target
    material = read_material(corpora, pair, settings.max_temperature)
    shortlist = shortlist_of(material.corpus, material.learn, min(settings.shortlist, model.vocabulary))
    identity = ModelIdentity.of(model, pair.target_id)
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    if settings.kind == "feature":
        shape = FeatureShape.of(model, settings.depth, settings.inner)
        stack: Any = FeatureStack(model, shape, shortlist, settings.ahead, settings.seed)
    else:
        stack = StandaloneStack(
            model,
            StandaloneShape(settings.width, settings.depth, settings.inner or default_inner(settings.width)),
            material.corpus.tokens.long(),
            shortlist,
            settings.seed,
        )
    base = cache_folder() / "fits" if work is None else Path(work)
    taught = [asdict(identity), material.corpus.hash, pair.dtype]
    learnt = {
        **asdict(replace(settings, passes=0.0, steps=None, minutes=None, lr=0.0)),
        "shortlist": hashlib.sha256(shortlist.numpy().tobytes()).hexdigest(),
    }
    digest = _digest([*taught, learnt])
    teacher = Teacher(model, material.corpus, base / f"states-{_digest(taught)}")
    batches = _Order(material, settings, model.context_length)
    steps = settings.steps or max(1, round(settings.passes * batches.per_pass))
    config = TrainingConfig(steps, settings.lr, seed=settings.seed, minutes=settings.minutes)

    def loss(step: int) -> tuple[Tensor, dict[str, float]]:
        found = stack.judged(batches.at(step), teacher, settings.accept_weight)
        if found is None:
            return next(stack.parameters()).sum() * 0.0, {}
        judged, n = found
        accepted = {f"accept {k}": a / n for k, a in enumerate(judged.accept.tolist(), 1)}
        return judged.loss.mean(), {**accepted, "same": float(judged.agree[0]) / n}

    with FitProgress(screen) as progress:
        training = train(stack, loss, config, base / f"drafter-{digest}", digest, progress.training)
    if training.ended == "interrupted":
        return None, training
    details: dict[str, Any] = {
        "made_by": {"command": "viasd-fit drafter", "options": said},
        "corpora": material.about,
        "training": {
            "steps": training.step,
            "of": training.of,
            "ended": training.ended,
            "seconds": round(training.seconds),
            "lr": settings.lr,
            "batch": settings.batch,
            "ahead": settings.ahead,
            "accept_weight": settings.accept_weight,
            "seed": settings.seed,
        },
        "parameters": sum(p.numel() for p in stack.parameters()),
        "dtype": pair.dtype,
        "versions": {"viasd": viasd.__version__, "torch": str(torch.__version__)},
        "made": time.strftime("%Y-%m-%d"),
    }
    held = _some(material, settings.batch, model.context_length)
    details["examined"] = examine(stack, held, teacher, settings.accept_weight)
    drafting: Pair
    if settings.kind == "feature":
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in stack.weights().items()}
        name = Path(output).name.removesuffix(".safetensors")
        file = FeatureDrafterFile(stack.shape, weights, shortlist, identity, name, details)
        drafting = replace(pair, drafter=None, drafter_kind="feature", feature=FeatureModel(file, model), measured={})
        details["decoded"] = decode(drafting, material.corpus, material.held, PROMPTS)
        file.save(output)
    else:
        small = stack.as_model()
        drafting = drafting_with(pair, small, shortlist)
        details["decoded"] = decode(drafting, material.corpus, material.held, PROMPTS)
        save_standalone(small, pair, shortlist, Path(output), identity, details)
    screen.note(
        f"the target's hidden states along the corpus stay in '{teacher.folder}' for other drafters; delete the folder "
        "to have the room back"
    )
    return {"output": output, "kind": settings.kind, "shortlist": len(shortlist), **details}, training


class _Order:
    """Which batch a step sees: every pass over the text in another order, the same for the same seed."""

    def __init__(self, material: Material, settings: FitSettings, limit: int) -> None:
        self._material = material
        self._settings = settings
        self._limit = limit
        self._held: tuple[int, list[Batch]] | None = None
        self.per_pass = len(self.of(0))

    def of(self, time: int) -> list[Batch]:
        """Batches of one pass over the text."""
        if self._held is None or self._held[0] != time:
            seed = self._settings.seed * 1_000_003 + time
            corpus, budget = self._material.corpus, self._settings.batch
            self._held = time, corpus.batches(self._material.learn, budget, seed=seed, max_length=self._limit)
        return self._held[1]

    def at(self, step: int) -> Batch:
        """Batch of a step, counted from 0."""
        batches = self.of(step // self.per_pass)
        # Conversations fall into batches a little differently each time.
        return batches[step % self.per_pass % len(batches)]


def _some(material: Material, budget: int, limit: int) -> list[Batch]:
    """Batches of about `EXAM_TOKENS` tokens of conversations kept back, from all over them."""
    total = sum(min(limit, len(material.corpus.conversation(n))) for n in material.held)
    stride = max(1, round(total / EXAM_TOKENS))
    return material.corpus.batches(material.held[::stride], budget, max_length=limit)


def _digest(said: Any) -> str:
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
