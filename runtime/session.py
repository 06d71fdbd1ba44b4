"""One answer: strategy rounds until an end is reached, cut exactly there, as text deltas with their tier."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from viasd.draws import Draws, SeededDraws
from viasd.errors import HeadsError, LoadError, OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import Assembly, alpha_of, headed
from viasd.runtime.config import SELF_SKIP, GenerationConfig, Plan, thresholds_of
from viasd.runtime.config import plan as settle_plan
from viasd.runtime.drafters import Drafter
from viasd.runtime.gates import Gate, RatioGate, Thresholds
from viasd.runtime.guard import Guard, GuardConfig, GuardedGate
from viasd.runtime.metrics import Counters
from viasd.runtime.names import EXITING, MASKED
from viasd.runtime.readouts import FULL, SLIM, Readouts, describe_readouts, scored_with, settle_readouts
from viasd.runtime.result import Result, describe_loss
from viasd.runtime.strategies import Emission, Strategy, Workbench
from viasd.runtime.target import Target, TieredTarget
from viasd.runtime.textstream import Piece, TextStream
from viasd.runtime.tiers import measure_tiers, recorded_refusal
from viasd.sampling import Sampler

DEFAULT_MAX_DISAGREEMENT = 0.02


class _Piece(NamedTuple):
    text: str
    token_ids: list[int]
    tier: str
    stats: Counters


class Event(_Piece):
    """A piece of an answer as it is made; unpacks as ``text, token_ids, tier, stats``.

    Attributes:
        text: Text delta; empty while a character is incomplete or a stop string may be beginning.
        token_ids: The tokens it covers.
        tier: Where the last of them came from.
        stats: The running counts (the same object throughout; it changes as the answer goes on).
        selected_layers: Of these tokens; see `Result`.
    """

    selected_layers: Sequence[int | None] = ()

    @classmethod
    def of(
        cls, text: str, token_ids: list[int], tier: str, stats: Counters, selected_layers: Sequence[int | None]
    ) -> Event:
        """An event of all its parts."""
        event = cls(text, token_ids, tier, stats)
        event.selected_layers = selected_layers
        return event


@dataclass(frozen=True)
class Ending:
    """Where an answer ends.

    Attributes:
        room: Token limit.
        eos: End-of-sequence tokens.
        keep: Sees a round's tokens before they are committed and says how many of them stay (fewer where a stop string
            was completed) and whether the answer ends there; None keeps all.
    """

    room: int
    eos: frozenset[int]
    keep: Callable[[list[int]], tuple[int, bool]] | None = None


def rounds(
    strategy: Strategy,
    target: Target,
    drafter: Drafter | None,
    sampler: Sampler,
    tokens: list[int],
    ending: Ending,
    counters: Counters,
) -> Iterator[tuple[Emission, str | None]]:
    """Runs a strategy to the end of an answer, committing its tokens to `tokens`.

    Yields:
        Each round's emission cut at the end of the answer, and the reason if this is the last: ``eos``, ``stop`` or
        ``length``.
    """
    left = ending.room
    if drafter is not None:
        drafter.settle(tokens)
    while True:
        emission = strategy.round(tokens, left)
        emission, reason = cut(emission, left, ending.eos)
        if ending.keep is not None:
            kept, stopped = ending.keep(emission.tokens)
            emission = shortened(emission, kept)
            reason = "stop" if stopped else reason
        n = len(emission.tokens)
        sampler.commit(tokens, emission.tokens, emission.logits)
        tokens.extend(emission.tokens)
        left -= n
        target.settle(tokens)
        if drafter is not None:
            drafter.settle(tokens)
        yield emission, reason
        if reason is not None:
            return


def cut(emission: Emission, room: int, eos: frozenset[int]) -> tuple[Emission, str | None]:
    """Cuts a round's tokens after the first EOS and at the limit; what lies beyond was never emitted."""
    n = min(len(emission.tokens), room)
    reason = "length" if n == room else None
    for i, token in enumerate(emission.tokens[:n]):
        if token in eos:
            n, reason = i + 1, "eos"
            break
    return shortened(emission, n), reason


def shortened(emission: Emission, n: int) -> Emission:
    """The first n tokens of an emission."""
    if n == len(emission.tokens):
        return emission
    return Emission(
        emission.tokens[:n],
        emission.tiers[:n],
        emission.logits[:n],
        emission.drafted[:n],
        min(emission.unseen, n),
    )


class Session:
    """Iterates over the events of one answer; `result` holds the whole of it afterwards.

    Args:
        pair: A loaded pair.
        prompt_ids: The prompt.
        config: What to do.
        mask: Layers the slim verifier keeps, or None.
        heads: Light heads, or None.
        guard: A guard that has learnt from earlier answers (a chat); None makes a fresh one.
        chat: Whether the prompt came through a chat template (its answer is then a text of its own).
        draws: Source of randomness (tests); None seeds one.

    Raises:
        OptionError: If options contradict each other or the pair.
        MaskError: If the mask is not for this target.
        HeadsError: If the heads are not, or are needed and missing.
        ContextLengthError: If the prompt leaves no room.
    """

    def __init__(
        self,
        pair: Pair,
        prompt_ids: Sequence[int],
        config: GenerationConfig,
        *,
        mask: LayerMask | None = None,
        heads: LightHeads | None = None,
        guard: Guard | None = None,
        chat: bool = False,
        draws: Draws | None = None,
    ) -> None:
        self.pair = pair
        self.config = config
        self.prompt = pair.encode(prompt_ids)
        self.notes: list[str] = []
        self.heads = heads
        if heads is not None and (warning := heads.check(pair.target, pair.target_id)):
            self.notes.append(warning)
        mask = headed(mask, heads, pair)
        self.mask = mask
        self._mask_warning: str | None = None
        if mask is not None:
            self._mask_warning = mask.check(pair.target, pair.target_id)
            if self._mask_warning:
                self.notes.append(self._mask_warning)
        self.plan = self._settle()
        if heads is not None and self.plan.strategy not in EXITING and (mask is None or mask.prefix is None):
            raise OptionError(
                f"light heads are for strategy adadecode or a mask that ends in one (prefix:E), but this is "
                f"{self.plan.strategy} without; leave them out"
            )
        if self.plan.strategy in EXITING and heads is None:
            raise HeadsError(
                f"strategy {self.plan.strategy} needs light heads and none were given: add --heads FILE (viasd-fit heads "
                "trains them), or --heads lens:7,15,22 for untrained ones behind so many layers"
            )
        self.seed = secrets.randbits(31) if config.seed is None else config.seed
        self.counters = Counters()
        self._limit = min(config.max_new_tokens, pair.target.context_length - len(self.prompt))
        if self._limit < config.max_new_tokens:
            self.notes.append(
                f"the answer is limited to {self._limit} tokens: prompt and answer share a context of "
                f"{pair.target.context_length}"
            )
        self._sampler = Sampler(config.sampling, config.processors)
        self._draws = draws or SeededDraws(self.seed)
        slim = mask.route if mask is not None and self.plan.strategy in ("cascade", "slim") else None
        self.readouts = settle_readouts(config.decoding, self.plan, mask)
        n_slim = None if slim is None else len(slim.layers)
        self.notes += describe_readouts(self.readouts, pair.target.n_layers, n_slim)
        full_readout, slim_readout = self.readouts.bind(pair, slim, self.seed)
        self._target = TieredTarget(
            pair.target,
            slim,
            self.counters,
            full_readout=full_readout,
            slim_readout=slim_readout,
            log_every=config.decoding.readout_log,
        )
        self.guard = guard
        bench = Workbench(self._target, self._sampler, self._draws, self.counters)
        stops = frozenset() if config.ignore_eos else pair.eos_ids
        assembly = Assembly(
            pair, config.decoding, self.plan, mask, self._target, stops, len(self.prompt), self.notes.append, heads
        )
        self._drafter = assembly.drafter(bench)
        self._strategy = assembly.strategy(bench, self._drafter, self._make_gate)
        self._text = TextStream(pair.tokenizer, () if chat else self.prompt, tuple(config.stop))
        self._pieces: list[Piece] = []
        self.result: Result | None = None

    def __iter__(self) -> Iterator[Event]:
        # Inference mode is entered around each round and not around a yield: whoever holds the iterator keeps their own.
        counters, tokens = self.counters, list(self.prompt)
        if self.result is not None:
            raise OptionError("a session makes one answer, and this one has been made; start another")
        eos = frozenset() if self.config.ignore_eos else self.pair.eos_ids
        ending = Ending(self._limit, eos, self._take)
        steps = rounds(self._strategy, self._target, self._drafter, self._sampler, tokens, ending, counters)
        produced: list[int] = []
        tiers: list[str] = []
        layers: list[int | None] = []
        text = ""
        reason: str | None = None
        complete = False
        try:
            with self._working():
                self._target.prefill(tokens[:-1])
            while reason is None:
                with self._working():
                    emission, reason = next(steps)
                pieces = self._pieces
                produced += emission.tokens
                tiers += emission.tiers
                chosen = self._chosen(emission)
                layers += chosen
                self._count(emission)
                text += "".join(piece.text for piece in pieces)
                position = 0
                for piece in pieces:
                    end = position + piece.tokens
                    here = slice(position, end)
                    yield Event.of(piece.text, emission.tokens[here], emission.tiers[end - 1], counters, chosen[here])
                    position = end
            rest = self._text.finish()
            text += rest
            complete = True
            if rest:
                yield Event(rest, [], tiers[-1], counters)
        finally:
            if not complete:
                # Interrupted: what a stop string or a character might have needed belongs to the answer now.
                text += self._text.finish()
            self.result = self._finish(text, produced, tiers, layers, reason or "interrupted")

    def _take(self, tokens: list[int]) -> tuple[int, bool]:
        """A round's tokens as text, up to the one that completes a stop string."""
        self._pieces = self._text.push(tokens)
        return self._text.consumed, self._text.stopped_at is not None

    def _settle(self) -> Plan:
        config = self.config.decoding
        chosen = settle_plan(config, has_mask=self.mask is not None)
        if chosen.strategy == "cascade" and config.tiers == "auto" and self.mask is not None:
            readouts = settle_readouts(config, chosen, self.mask)
            refusal = recorded_refusal(self.pair, self.mask, config, readouts)
            if refusal is None:
                greedy = self.config.sampling.greedy
                report = measure_tiers(self.pair, self.mask, config, chosen.mode, greedy=greedy, readouts=readouts)
                refusal = None if report.keeps_slim else report.sentence()
                self.notes += [report.sentence()] if report.keeps_slim else []
            if refusal is not None:
                self.notes.append(refusal)
                if readouts.slim is not None:
                    self.notes.append("the slim verifier's readout is left out with it")
                mode = "lossless" if chosen.mode == "via" else chosen.mode
                return replace(chosen, strategy="sd", mode=mode)
        if chosen.reason:
            self.notes.append(chosen.reason)
        return chosen

    def _make_gate(self) -> Gate:
        config = self.config.decoding
        thresholds = thresholds_of(config)
        if config.gate == "ratio":
            self.notes.append("gate ratio: no guard, so nothing bounds how far this output strays from the target")
            return RatioGate(thresholds)
        budget = config.max_disagreement
        if self.guard is None:
            self.guard = Guard(
                GuardConfig(max_disagreement=DEFAULT_MAX_DISAGREEMENT if budget is None else budget),
                self._guard_start(),
            )
        elif budget is not None and budget != self.guard.config.max_disagreement:
            raise OptionError(
                f"max_disagreement {budget:g} contradicts the guard that was handed over, whose budget is "
                f"{self.guard.config.max_disagreement:g}; leave one out"
            )
        return GuardedGate(thresholds, self.guard)

    def _guard_start(self) -> Mapping[str, Any] | None:
        """Coefficients stored with the mask, but only where they were fitted for what is about to happen.

        The search fits them at temperature 0, with the paper's thresholds and its pair's own drafter and weights.
        """
        start: Mapping[str, Any] | None = None if self.mask is None else self.mask.details.get("guard")
        if self.mask is None or start is None:
            return None
        config = self.config
        fitting = (
            config.sampling.greedy
            and config.decoding.thresholds in (None, Thresholds())
            and self.mask.pair == self.pair.name
            and (self.pair.drafter_kind != "self" or config.decoding.self_skip == SELF_SKIP)
            and not self._mask_warning
            and self.readouts == Readouts(None, scored_with(self.mask))
        )
        if not fitting:
            self.notes.append(
                "the guard starts without the mask's coefficients, which were fitted for another pair, temperature, "
                "thresholds, readout or self_skip; until it has learnt, every token is checked"
            )
        return start if fitting else None

    def _chosen(self, emission: Emission) -> list[int | None]:
        """The layers that an emission's tokens were read out from; counts them."""
        if self.readouts.full is None and self.readouts.slim is None:
            return []
        tier = SLIM if self.readouts.full is None else FULL
        found = self._target.chosen(tier, len(self.prompt) + self.counters.emitted, len(emission.tokens))
        if tier == FULL:
            found[: emission.unseen] = [None] * emission.unseen
        for choice in found:
            if choice is not None:
                self.counters.readout.emitted(choice.depth)
        return [None if choice is None else choice.layer for choice in found]

    def _count(self, emission: Emission) -> None:
        counters = self.counters
        counters.emitted += len(emission.tokens)
        for tier in emission.tiers:
            counters.by_tier[tier] += 1
        counters.accepted += sum(emission.drafted)
        counters.unseen += emission.unseen

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Counts the time inside as this answer's; what its reader does between two events is not."""
        counters, started = self.counters, time.perf_counter()
        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"out of memory on {self.pair.device} after {counters.emitted} tokens; use a shorter prompt or answer, "
                "another --dtype or --quantization, or --device-map auto"
            ) from error
        finally:
            counters.seconds += time.perf_counter() - started
            parts = counters.seconds_by_tier
            parts["loop"] = max(0.0, counters.seconds - sum(s for part, s in parts.items() if part != "loop"))

    def _finish(
        self, text: str, produced: list[int], tiers: list[str], layers: list[int | None], reason: str
    ) -> Result:
        alpha, plan, readout = alpha_of(self.config.decoding), self.plan, self.readouts.full
        loss = describe_loss(
            plan.mode, self.counters, plan.lossless, alpha, greedy=self._sampler.greedy, readout=readout
        )
        return Result(
            text=text,
            token_ids=produced,
            prompt_tokens=len(self.prompt),
            finish_reason=reason,
            strategy=self.plan.strategy,
            mode=self.plan.mode,
            lossless=self.plan.lossless,
            tiers=tiers,
            stats=self.counters,
            seed=self.seed,
            pair=self.pair.name,
            mask=self.mask.name if self.mask is not None and self.plan.strategy in MASKED else None,
            heads=None if self.heads is None else self.heads.name,
            dtype=self.pair.dtype,
            device=self.pair.device,
            notes=[*self.notes, *([] if self.plan.lossless else [loss])],
            loss=loss,
            readouts=self.readouts,
            selected_layers=layers,
        )


def check_prompt_kind(prompt: object) -> bool:
    """Whether a prompt is a chat (a sequence of messages)."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    if len(prompt) and isinstance(prompt[0], dict):
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
            raise OptionError("chat messages must each have 'role' and 'content'")
        return True
    return False
