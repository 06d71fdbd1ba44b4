"""Training a standalone drafter: a small Llama that shares the target's tokenizer, and its folder for transformers.

Input and output embedding are the target's own, seen through two trained matrices: ``E P`` and ``E* R`` with P and R
``[d, w]``. So every word of the vocabulary has a place from the beginning, those that training never meets too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel

from viasd.errors import FitError
from viasd.files import make_folder, write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.pair import Pair
from viasd.probe import load_layered
from viasd.search.fit.corpus import Batch
from viasd.search.fit.draftloss import Judged, judge
from viasd.search.fit.teaching import Teacher
from viasd.standalone import RECORD, SCHEMA_VERSION

_HEAD_DIM = 64


@dataclass(frozen=True)
class StandaloneShape:
    """Sizes of a standalone drafter: width, decoder layers, width of the MLPs."""

    width: int
    depth: int
    inner: int

    def config(self, vocabulary: int, context: int) -> LlamaConfig:
        """For transformers."""
        heads = max(1, self.width // _HEAD_DIM)
        return LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            intermediate_size=self.inner,
            num_hidden_layers=self.depth,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            head_dim=self.width // heads,
            max_position_embeddings=context,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )


def default_inner(width: int) -> int:
    """Eight thirds of the width, a multiple of 16."""
    return round(width * 8 / 3 / 16) * 16


class StandaloneStack(nn.Module):
    """A standalone drafter while it is trained: weights in fp32, products in bf16 where the target is.

    Args:
        model: The target.
        shape: Sizes.
        tokens: The corpus's tokens ``[N]``: the projections start as the principal axes of its words.
        shortlist: Token ids ``[m]`` that can be drafted.
        seed: Of the initial weights.

    Raises:
        FitError: If the target's head is no plain matrix, or narrower than the drafter.
    """

    def __init__(
        self, model: LayeredModel, shape: StandaloneShape, tokens: Tensor, shortlist: Tensor, seed: int = 0
    ) -> None:
        super().__init__()
        if shape.width > model.config.hidden_size:
            raise FitError(
                f"expected a standalone drafter at most as wide as its target ({model.config.hidden_size}), but --width is "
                f"{shape.width}"
            )
        self.shape = shape
        self._model = model
        self._embedding = model.decoder.embed_tokens.weight.detach()
        whole: Any = model.model
        head = whole.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.weight.is_meta:
            raise FitError(
                f"{model.name} has an LM head that is no plain matrix, which a standalone drafter needs; use --kind feature"
            )
        self._output = head.weight.detach()
        self._words = self._output[shortlist.to(self._output.device)]
        self._head = model.head_rows(shortlist)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        config = shape.config(2, model.context_length)
        config._attn_implementation = "sdpa"
        self.body = LlamaModel(config)
        self.body.embed_tokens = None  # words come in by the projection
        torch.set_rng_state(state)
        counts = tokens.bincount(minlength=self._embedding.shape[0]).to(self._embedding.device)
        self.enter = nn.Parameter(_axes(self._embedding, counts, shape.width))
        self.leave = nn.Parameter(_axes(self._output, counts, shape.width))

    def rows(self, projected: Tensor) -> Tensor:
        """Results ``[n, d]`` -> logits over the shortlist, ``[n, m]``."""
        return linear(projected.to(self._words.dtype), self._words).float()

    def judged(self, batch: Batch, teacher: Teacher, weight: float) -> tuple[Judged, int] | None:
        """See `viasd.search.fit.draftexam.Taught`. There is one step: it needs nothing of the target's."""
        states, sums = teacher.along(batch)
        scored = batch.scored
        if not bool(scored.any()):
            return None
        device = self.enter.device
        hidden = self.outputs(batch.ids.to(device))[scored.to(device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=self._half):
            projected = linear(hidden, self.leave)

        def teach(rows: Tensor) -> Tensor:
            return self._model.readout(rows[None], self._head)

        found = judge(self.rows, [projected], states[scored].to(device), sums[scored].to(device), teach, weight)
        return found, int(scored.sum())

    def outputs(self, ids: Tensor) -> Tensor:
        """Final normed states ``[B, L, w]`` of tokens ``[B, L]``."""
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._half):
            entered = (self._embedding[ids] @ self.enter).float()
            out: Tensor = self.body(inputs_embeds=entered, use_cache=False).last_hidden_state
        return out

    @torch.no_grad()
    def as_model(self) -> LlamaForCausalLM:
        """The drafter as transformers knows it, in the target's dtype."""
        model = self._model
        config = self.shape.config(model.vocabulary, model.context_length)
        small = LlamaForCausalLM(config).eval()
        small.model.layers.load_state_dict(self.body.layers.state_dict())
        small.model.norm.load_state_dict(self.body.norm.state_dict())
        n = model.vocabulary
        small.model.embed_tokens.weight.copy_(self._embedding[:n].float() @ self.enter)
        small.lm_head.weight.copy_(self._output[:n].float() @ self.leave)
        made: LlamaForCausalLM = small.to(model.dtype)
        return made

    @property
    def _half(self) -> bool:
        return self._model.dtype == torch.bfloat16


def drafting_with(pair: Pair, small: LlamaForCausalLM, shortlist: Tensor) -> Pair:
    """A pair whose target stays and whose drafter is a standalone one."""
    layered = load_layered(small, vocabulary=pair.target.vocabulary)
    return replace(pair, drafter=layered, drafter_kind="model", shortlist=shortlist, measured={})


def save_standalone(
    small: LlamaForCausalLM,
    pair: Pair,
    shortlist: Tensor,
    folder: Path,
    identity: ModelIdentity,
    details: Mapping[str, Any],
) -> None:
    """Writes a folder that transformers and viasd read: model, tokenizer, and a record with the shortlist.

    Raises:
        FitError: If it can't be written.
    """
    make_folder(folder, FitError)
    ends = sorted(pair.eos_ids)
    small.generation_config = GenerationConfig(eos_token_id=ends or None, pad_token_id=ends[0] if ends else None)
    small.config.eos_token_id = ends or None
    try:
        small.save_pretrained(folder)
        pair.tokenizer.save_pretrained(folder)
    except OSError as error:
        raise FitError(f"can't write the drafter to '{folder}': {error.strerror or error}") from error
    record = {
        "schema": SCHEMA_VERSION,
        "kind": "standalone",
        "target": asdict(identity),
        "shortlist": shortlist.tolist(),
        **details,
    }
    write_atomically(folder / RECORD, json.dumps(record), FitError)


def _axes(words: Tensor, counts: Tensor, width: int) -> Tensor:
    """Principal axes ``[d, w]`` of the words of a text, scaled so that its words get entries of mean square 1 / 4."""
    weights = counts.double() / counts.sum()
    rows = words.double()
    square = (rows * weights[:, None]).T @ rows
    values, vectors = torch.linalg.eigh(square)
    axes = vectors[:, -width:].flip(-1)
    scale = (4 * values[-width:].sum() / width).clamp_min(1e-30).rsqrt()
    return (axes * scale).float()
