"""Transformers' own decoding on the same weights: `generate`, assisted generation, prompt lookup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from viasd.errors import OptionError
from viasd.pair import Pair
from viasd.runtime.bench.config import BenchConfig
from viasd.runtime.bench.methods import PEER, Answer, MethodSpec, clock


class Peer:
    """A method of transformers.

    Everything that would change what is generated is given explicitly, since a checkpoint's own generation config may set
    penalties or filters that our methods are not asked for.

    Args:
        pair: The pair.
        name: Name in the benchmark.
        kind: ``generate``, ``assisted`` or ``lookup``.
        config: The benchmark.
        gamma: Drafted tokens per round.

    Raises:
        OptionError: If assisted generation is asked for and the pair has no drafter model, or the target was quantised to
            int8 or int4 by us.
    """

    def __init__(self, pair: Pair, name: str, kind: str, config: BenchConfig, gamma: int) -> None:
        if kind == "assisted" and pair.drafter is None:
            raise OptionError(
                f"assisted generation needs a drafter model, and {pair.name} drafts by {pair.drafter_kind}"
            )
        model: Any = pair.target.model
        if any(parameter.is_meta for parameter in model.parameters()):
            raise OptionError("the target's own weights were freed when it was quantised, so transformers can't run it")
        drafting = {} if kind == "generate" else {"gamma": gamma}
        self.spec = MethodSpec(name, PEER, lossless=True, options={"peer": kind, **drafting})
        self._pair = pair
        self._kind = kind
        self._gamma = gamma
        self._config = config
        self._options = self._generate_options()

    def prepare(self, ids: Sequence[int]) -> None:
        """See `Method`. A peer measures nothing."""

    def answer(self, ids: Sequence[int]) -> Answer:
        """See `Method`."""
        model: Any = self._pair.target.model
        device = self._pair.target.device
        row = torch.tensor([list(ids)], device=device)
        torch.manual_seed(self._config.seed)
        with torch.inference_mode(), self._drafting(), _counted(model) as calls:
            start = clock(device)
            out = model.generate(row, attention_mask=torch.ones_like(row), **self._options)
            seconds = clock(device) - start
        tokens = [int(i) for i in out[0, len(ids) :]]
        return Answer(
            tokens=tokens,
            text=str(self._pair.tokenizer.decode(tokens, skip_special_tokens=True)),
            seconds=seconds,
            finish_reason="eos" if tokens and tokens[-1] in self._pair.eos_ids else "length",
            target_calls=len(calls),
        )

    def settle(self) -> None:
        """See `Method`. A peer keeps nothing."""

    def _generate_options(self) -> dict[str, Any]:
        pair, config = self._pair, self._config
        options: dict[str, Any] = {
            "max_new_tokens": config.max_new_tokens,
            "do_sample": config.temperature > 0,
            "repetition_penalty": 1.0,
            "eos_token_id": None if config.ignore_eos else sorted(pair.eos_ids) or None,
            "pad_token_id": pair.tokenizer.pad_token_id or 0,
        }
        if config.temperature > 0:
            options |= {"temperature": config.temperature, "top_k": 0, "top_p": 1.0}
        if self._kind == "lookup":
            options["prompt_lookup_num_tokens"] = self._gamma
        if self._kind == "assisted":
            assert pair.drafter is not None
            options["assistant_model"] = pair.drafter.model
        return options

    @contextmanager
    def _drafting(self) -> Iterator[None]:
        """Assisted generation reads its draft length from the drafter's generation config: set for one call, and back."""
        if self._kind != "assisted":
            yield
            return
        assert self._pair.drafter is not None
        settings: Any = self._pair.drafter.model.generation_config
        wanted = {"num_assistant_tokens": self._gamma, "num_assistant_tokens_schedule": "constant"}
        before = {key: getattr(settings, key, None) for key in wanted}
        try:
            for key, value in wanted.items():
                setattr(settings, key, value)
            yield
        finally:
            for key, old in before.items():
                setattr(settings, key, old)


@contextmanager
def _counted(model: Any) -> Iterator[list[None]]:
    """Grows by one entry with every forward pass of the model."""
    calls: list[None] = []
    handle = model.register_forward_pre_hook(lambda module, inputs: calls.append(None))
    try:
        yield calls
    finally:
        handle.remove()
