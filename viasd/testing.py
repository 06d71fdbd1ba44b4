"""Small models and fakes for tests: tiny random decoders of every family, a tokenizer, tables in a target's place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from viasd.draws import Draws
from viasd.rows import Row, Rows
from viasd.runtime.drafters.base import Draft, PasslessDrafter
from viasd.sampling import Ahead
from viasd.shortlist import ShortRow

VOCABULARY = 300
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = 8
# Per family: the config's model type and what it needs besides the shape.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": _WINDOW},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": _WINDOW},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": _WINDOW},
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "smollm3": {"model_type": "smollm3"},
}


def tiny_model(
    family: str = "llama", *, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32, **shape: Any
) -> Any:
    """A randomly initialised decoder of a family, in eval mode on the CPU.

    Args:
        family: A key of `FAMILIES`.
        seed: Seed of the weights.
        scale: Factor on the weight matrices; larger ones make sharper, more varied rows.
        dtype: Data type.
        **shape: Replaces entries of the config.
    """
    options = {**_SHAPE, **FAMILIES[family], **shape}
    config = CONFIG_MAPPING[options.pop("model_type")](**options)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    torch.set_rng_state(state)
    return model.to(dtype)


def perturbed(model: nn.Module, amount: float, *, seed: int = 1) -> Any:
    """A copy of a model with noise of relative size `amount` on its weight matrices: a drafter that often agrees."""
    import copy

    clone = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in clone.parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                parameter.add_(noise * parameter.std() * amount)
    return clone


def redundant_model(layers: Sequence[int], family: str = "llama", *, rest: float = 0.0, **options: Any) -> Any:
    """A tiny model of which some layers do nothing: a target with known depth redundancy.

    Args:
        layers: The layers that pass their input on as it is.
        family: See `tiny_model`.
        rest: Share of what they would add that is left of it; 0 makes them exactly the identity.
        **options: See `tiny_model`.
    """
    model = tiny_model(family, **options)
    with torch.no_grad():
        for index in layers:
            layer = model.model.layers[index]
            layer.self_attn.o_proj.weight.mul_(rest)
            layer.mlp.down_proj.weight.mul_(rest)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCABULARY` entries: pad, bos, eos, two chat marks, 256 bytes, and fillers.

    It encodes any text and has a chat template.
    """
    special = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*special, *alphabet]
    names += [f"<filler{i}>" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=special[3:],
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return fast


class TableTarget:
    """A target whose rows come from functions of the prefix: for exact laws and for zero-cost overhead measurements.

    Args:
        q: Prefix -> raw logits ``[V]`` of the full verifier.
        slim: The same of the slim verifier.
    """

    def __init__(self, q: Callable[[tuple[int, ...]], Tensor], slim: Callable[[tuple[int, ...]], Tensor]) -> None:
        self._q = q
        self._slim = slim

    def full(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `viasd.runtime.target.Target`."""
        return torch.stack([self._q(tuple(tokens[: len(tokens) - rows + 1 + i])) for i in range(rows)])

    def slim(self, tokens: Sequence[int], rows: int) -> Tensor:
        """See `viasd.runtime.target.Target`."""
        return torch.stack([self._slim(tuple(tokens[: len(tokens) - rows + 1 + i])) for i in range(rows)])

    def settle(self, tokens: Sequence[int]) -> None:
        """See `viasd.runtime.target.Target`. Tables keep no state."""


class TableDrafter(PasslessDrafter):
    """A drafter whose rows come from a function of the prefix.

    Args:
        p: Prefix -> raw logits ``[V]``.
        point_mass: Propose the argmax as a point mass (as prompt lookup does) instead of drawing.
        min_confidence: Stop before drawing where the largest probability is below this.
    """

    def __init__(
        self,
        p: Callable[[tuple[int, ...]], Tensor],
        *,
        point_mass: bool = False,
        min_confidence: float = 0.0,
    ) -> None:
        self.name = "table"
        self._p = p
        self._point_mass = point_mass
        self._min_confidence = min_confidence

    def propose(self, tokens: Sequence[int], limit: int, ahead: Ahead, draws: Draws) -> Draft:
        """See `viasd.runtime.drafters.Drafter`."""
        proposed: list[int] = []
        rows: list[Row] = []
        confidence: list[float] = []
        raw: list[Tensor] = []
        while len(proposed) < limit:
            logits = self._p((*tokens, *proposed))
            top = torch.softmax(logits, dim=-1)
            if float(top.max()) < self._min_confidence:
                break
            row = Row(token=int(logits.argmax())) if self._point_mass else ahead.row(logits)
            token = draws.draft(row)
            ahead.push(token)
            proposed.append(token)
            rows.append(row)
            confidence.append(float(top[token]))
            raw.append(logits)
        if self._point_mass:
            return Draft(proposed, Rows.one_hot(proposed), confidence)
        return Draft(proposed, Rows.joined(rows) if rows else Rows(tokens=()), confidence, raw)

    def rewind(self, tokens: Sequence[int]) -> None:
        """See `viasd.runtime.drafters.Drafter`."""

    def settle(self, tokens: Sequence[int]) -> None:
        """See `viasd.runtime.drafters.Drafter`."""


class EnumeratingDraws:
    """Draws that walk through every outcome, one run a path, with each path's probability.

    Run the code under test once per `paths()` item; `weight` is then the probability of what happened.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self._script: list[int] = []
        self._made: list[tuple[int, int]] = []  # (choice, number of choices)

    def paths(self) -> Any:
        """Yields itself once for every path, reset to its beginning."""
        while True:
            self.weight = 1.0
            self._made = []
            yield self
            script = [choice for choice, _ in self._made]
            sizes = [size for _, size in self._made]
            while script and script[-1] + 1 >= sizes[len(script) - 1]:
                script.pop()
            if not script:
                return
            script[-1] += 1
            self._script = script

    def _choose(self, weights: list[float]) -> int:
        possible = [i for i, w in enumerate(weights) if w > 0]
        step = len(self._made)
        choice = self._script[step] if step < len(self._script) else 0
        self._made.append((choice, len(possible)))
        index = possible[choice]
        self.weight *= weights[index]
        return index

    def token(self, row: Row) -> int:
        """See `Draws`."""
        if row.probs is None:
            assert row.token is not None
            return row.token
        return self._choose(row.probs.tolist())

    def draft(self, row: Row) -> int:
        """See `Draws`."""
        return self.token(row)

    def accept(self, probability: float) -> bool:
        """See `Draws`."""
        return self._choose([max(0.0, 1 - probability), min(1.0, probability)]) == 1

    def audit(self, probability: float) -> bool:
        """See `Draws`."""
        return self.accept(probability)


class TableWave:
    """A wave (`viasd.runtime.wave`) whose rows come from functions of the prefix.

    Args:
        q: Prefix -> raw logits ``[V]`` of the full verifier.
        heads: The same of the head behind so many layers.
        layers: Layers of the target.
    """

    def __init__(
        self,
        q: Callable[[tuple[int, ...]], Tensor],
        heads: Mapping[int, Callable[[tuple[int, ...]], Tensor]],
        layers: int,
    ) -> None:
        self.exits = tuple(sorted(heads))
        self.layers = layers
        self._q = q
        self._heads = heads
        self._prefix: tuple[int, ...] = ()
        self._entered = 0
        self._depth = 0

    def begin(self, tokens: Sequence[int]) -> None:
        """See `Wave`."""
        self._prefix, self._entered = tuple(tokens[:-1]), 0

    def enter(self, token: int) -> None:
        """See `Wave`."""
        self._prefix, self._entered, self._depth = (*self._prefix, token), self._entered + 1, 0

    def climb(self, exits: bool) -> int:
        """See `Wave`."""
        self._depth = min((e for e in self.exits if exits and e > self._depth), default=self.layers)
        return self._depth

    def promise(self) -> float | None:
        """See `Wave`."""
        return None

    def guess(self) -> ShortRow:
        """See `Wave`."""
        row = self._heads[self._depth](self._prefix)
        return ShortRow.of(row)

    def wait(self) -> None:
        """See `Wave`. Tables keep no state."""

    def top(self) -> Tensor:
        """See `Wave`."""
        n = self._entered
        return torch.stack([self._q(self._prefix[: len(self._prefix) - n + 1 + i]) for i in range(n)])
