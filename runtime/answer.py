"""One answer, however its passes are run: what it is put together from, its rounds as work, events and result."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from viasd.draws import Draws, SeededDraws
from viasd.errors import LoadError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import Assembly, alpha_of
from viasd.runtime.config import GenerationConfig
from viasd.runtime.gates import Gate
from viasd.runtime.guard import Guard
from viasd.runtime.metrics import Counters
from viasd.runtime.names import MASKED
from viasd.runtime.passes import Steps
from viasd.runtime.readouts import FULL, SLIM, describe_readouts
from viasd.runtime.result import Result, describe_loss
from viasd.runtime.rounds import Ending, round_steps
from viasd.runtime.settling import make_gate, settle
from viasd.runtime.strategies import Emission, Workbench
from viasd.runtime.target import TieredTarget
from viasd.runtime.textstream import Piece, TextStream
from viasd.sampling import Sampler


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


class _Text:
    """An answer's text. It knows nothing of the answer, so that no circle keeps the answer's memory when it is dropped."""

    def __init__(self, stream: TextStream) -> None:
        self.stream = stream
        self.pieces: list[Piece] = []

    def keep(self, emission: Emission) -> tuple[int, bool]:
        """Takes a round's tokens, up to the one that completes a stop string; see `Ending`."""
        self.pieces = self.stream.push(emission.tokens)
        return self.stream.consumed, self.stream.stopped_at is not None


class Answer:
    """One answer in the making. It runs nothing itself.

    Args:
        pair: A loaded pair.
        prompt_ids: The prompt.
        config: What to do.
        mask: Layers the slim verifier keeps, or None.
        heads: Light heads, or None.
        guard: A guard that has learnt from earlier answers (a chat); None makes a fresh one.
        chat: Whether the prompt came through a chat template (its answer is then a text of its own).
        draws: Source of randomness (tests); None seeds one.
        sampler: From logits to laws; None makes that of the configuration.
        chunk: Tokens of the prompt that are run at a time; None is what suits the device.
        name: What its lines in a log begin with, where there are several answers.

    Attributes:
        tokens: Prompt and committed tokens.
        readouts: The readout of each tier.
        room: Tokens it may have in all.
        target: The sequence's target.
        drafter: Its drafter, where there is one.
        result: The whole of it, once it has ended.

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
        sampler: Sampler | None = None,
        chunk: int | None = None,
        name: str | None = None,
    ) -> None:
        self.pair = pair
        self.config = config
        self.prompt = pair.encode(prompt_ids)
        self.notes: list[str] = []
        self.guard = guard
        self.heads = heads
        self._settled = settle(pair, config, mask, heads, self.notes.append)
        self.mask, self.plan = self._settled.mask, self._settled.plan
        self.seed = secrets.randbits(31) if config.seed is None else config.seed
        self.counters = Counters()
        self.room = min(config.max_new_tokens, pair.target.context_length - len(self.prompt))
        if self.room < config.max_new_tokens:
            self.notes.append(
                f"the answer is limited to {self.room} tokens: prompt and answer share a context of "
                f"{pair.target.context_length}"
            )
        self.sampler = sampler or Sampler(config.sampling, config.processors)
        slim = self.plan.strategy in ("cascade", "slim")
        route = self.mask.route if slim and self.mask is not None else None
        self.readouts = self._settled.readouts
        self.notes += describe_readouts(
            self.readouts, pair.target.n_layers, None if route is None else len(route.layers)
        )
        full_readout, slim_readout = self.readouts.bind(pair, route, self.seed)
        self.target = TieredTarget(
            pair.target,
            route,
            self.counters,
            chunk,
            full_readout=full_readout,
            slim_readout=slim_readout,
            log_every=config.decoding.readout_log,
            name=name,
        )
        bench = Workbench(self.target, self.sampler, draws or SeededDraws(self.seed), self.counters)
        eos = frozenset() if config.ignore_eos else pair.eos_ids
        self._text = _Text(TextStream(pair.tokenizer, () if chat else self.prompt, tuple(config.stop)))
        self.ending = Ending(self.room, eos, self._text.keep)
        assembly = Assembly(
            pair, config.decoding, self.plan, self.mask, self.target, eos, len(self.prompt), self.notes.append, heads
        )
        self.drafter = assembly.drafter(bench)
        self._strategy = assembly.strategy(bench, self.drafter, self._make_gate)
        self.tokens = list(self.prompt)
        self.text = ""
        self._tiers: list[str] = []
        self._layers: list[int | None] = []
        self.result: Result | None = None

    @property
    def produced(self) -> list[int]:
        """The answer's tokens so far."""
        return self.tokens[len(self.prompt) :]

    def round(self) -> Steps[tuple[Emission, str | None]]:
        """The passes of the next round; returns what it came to, for `take`, and why the answer ends there if it does."""
        left = self.room - len(self.tokens) + len(self.prompt)
        return round_steps(self._strategy, self.target, self.drafter, self.sampler, self.tokens, self.ending, left)

    def take(self, emission: Emission) -> list[Event]:
        """Counts a round's outcome and turns it into events."""
        counters = self.counters
        layers = self._chosen(emission)
        self._layers += layers
        counters.emitted += len(emission.tokens)
        for tier in emission.tiers:
            counters.by_tier[tier] += 1
        counters.accepted += sum(emission.drafted)
        counters.unseen += emission.unseen
        self._tiers += emission.tiers
        events, position = [], 0
        for piece in self._text.pieces:
            end = position + piece.tokens
            here = slice(position, end)
            events.append(Event.of(piece.text, emission.tokens[here], emission.tiers[end - 1], counters, layers[here]))
            self.text += piece.text
            position = end
        return events

    def rest(self) -> Event | None:
        """Text that was held back, now that the answer is complete."""
        rest = self._text.stream.finish()
        self.text += rest
        return Event(rest, [], self._tiers[-1], self.counters) if rest else None

    def finish(self, reason: str, error: str | None = None) -> Result:
        """The result, once and for all.

        Args:
            reason: Why the answer ended.
            error: What went wrong, where something did.
        """
        # Where it was cut short, what a stop string or a character might have needed belongs to the answer now.
        self.text += self._text.stream.finish()
        alpha = alpha_of(self.config.decoding)
        loss = describe_loss(
            self.plan.mode,
            self.counters,
            self.plan.lossless,
            alpha,
            greedy=self.sampler.greedy,
            readout=self.readouts.full,
        )
        n = len(self._tiers)
        self.result = Result(
            text=self.text,
            token_ids=self.produced[:n],
            prompt_tokens=len(self.prompt),
            finish_reason=reason,
            strategy=self.plan.strategy,
            mode=self.plan.mode,
            lossless=self.plan.lossless,
            tiers=self._tiers,
            stats=self.counters,
            seed=self.seed,
            pair=self.pair.name,
            mask=self.mask.name if self.mask is not None and self.plan.strategy in MASKED else None,
            heads=None if self.heads is None else self.heads.name,
            dtype=self.pair.dtype,
            device=self.pair.device,
            notes=[*self.notes, *([] if self.plan.lossless else [loss])],
            loss=loss,
            error=error,
            readouts=self.readouts,
            selected_layers=self._layers,
        )
        return self.result

    @contextmanager
    def working(self) -> Iterator[None]:
        """Counts the time inside as this answer's own; runs without gradients."""
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
            self.spent(time.perf_counter() - started)

    def spent(self, seconds: float) -> None:
        """Adds to the time that this answer took; what is none of the tiers' is the loop's."""
        counters = self.counters
        counters.seconds += seconds
        parts = counters.seconds_by_tier
        parts["loop"] = max(0.0, counters.seconds - sum(s for part, s in parts.items() if part != "loop"))

    def _chosen(self, emission: Emission) -> list[int | None]:
        """The layers that an emission's tokens were read out from; counts them."""
        if self.readouts.full is None and self.readouts.slim is None:
            return []
        tier = SLIM if self.readouts.full is None else FULL
        found = self.target.chosen(tier, len(self.prompt) + self.counters.emitted, len(emission.tokens))
        if tier == FULL:
            found[: emission.unseen] = [None] * emission.unseen
        for choice in found:
            if choice is not None:
                self.counters.readout.emitted(choice.depth)
        return [None if choice is None else choice.layer for choice in found]

    def _make_gate(self) -> Gate:
        gate, self.guard = make_gate(self._settled, self.guard, self.notes.append)
        return gate
