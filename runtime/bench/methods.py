"""What a benchmark compares: ways of answering a prompt. Our own are here, those of transformers in `peers.py`."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from viasd.hardware import wait_for
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.api import stream
from viasd.runtime.config import GenerationConfig
from viasd.runtime.guard import Guard
from viasd.runtime.metrics import Counters

OWN, PEER, BASELINE = "own", "peer", "baseline"


@dataclass(frozen=True)
class Answer:
    """One timed answer.

    Attributes:
        tokens: Its tokens.
        text: Its text.
        seconds: Wall time of the whole call, prefill included.
        finish_reason: Why it ended.
        target_calls: Forward passes of the target; a peer's prefill gives its first token and is counted, ours does not and
            is not, so that plain decoding has one a token either way.
        counters: What happened inside, None for a peer.
    """

    tokens: list[int]
    text: str
    seconds: float
    finish_reason: str
    target_calls: int
    counters: Counters | None = None


@dataclass(frozen=True)
class MethodSpec:
    """What a method is, as JSON can say it.

    Attributes:
        name: Unique in a benchmark.
        kind: ``own``, ``peer`` or ``baseline``.
        lossless: Whether its output should be plain decoding's own.
        options: How it was configured.
    """

    name: str
    kind: str
    lossless: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The spec as a JSON object."""
        return {"name": self.name, "kind": self.kind, "lossless": self.lossless, "options": dict(self.options)}


class Method(Protocol):
    """Answers prompts."""

    spec: MethodSpec

    def prepare(self, ids: Sequence[int]) -> None:
        """Called before a prompt's first answer: whatever is measured once per machine is measured now, not while timed."""
        ...

    def answer(self, ids: Sequence[int]) -> Answer:
        """Answers a prompt, timed."""
        ...

    def settle(self) -> None:
        """Called when a prompt has been answered for the last time: what was learnt from it may be kept."""
        ...


class OwnMethod:
    """A strategy of ours.

    A guard (`via` mode) learns from prompt to prompt, as it would in a chat; every repeat of a prompt starts from what the
    prompts before it taught.

    Args:
        pair: The pair.
        spec: What it is.
        config: The request.
        mask: Its mask, or None.
        heads: Its light heads, or None.
    """

    def __init__(
        self,
        pair: Pair,
        spec: MethodSpec,
        config: GenerationConfig,
        mask: LayerMask | None,
        heads: LightHeads | None = None,
    ) -> None:
        self.spec = spec
        self.mask = mask
        self.heads = heads
        self.config = config
        self._pair = pair
        self._guard: Guard | None = None
        self._learnt: Guard | None = None

    def prepare(self, ids: Sequence[int]) -> None:
        """See `Method`. Making the request asks for pass times at the prompt's length."""
        stream(self._pair, list(ids), mask=self.mask, heads=self.heads, config=self.config)

    def answer(self, ids: Sequence[int]) -> Answer:
        """See `Method`."""
        guard = copy.deepcopy(self._guard)
        start = clock(self._pair.target.device)
        answer = stream(self._pair, list(ids), mask=self.mask, heads=self.heads, guard=guard, config=self.config)
        for _ in answer:
            pass
        seconds = clock(self._pair.target.device) - start
        result = answer.result
        self._learnt = answer.session.guard
        return Answer(
            tokens=result.token_ids,
            text=result.text,
            seconds=seconds,
            finish_reason=result.finish_reason,
            target_calls=result.stats.full_calls,
            counters=result.stats,
        )

    def settle(self) -> None:
        """See `Method`."""
        self._guard = self._learnt


def clock(device: torch.device) -> float:
    """Seconds on a clock, once the device has done what it was given."""
    wait_for(device)
    return time.perf_counter()
