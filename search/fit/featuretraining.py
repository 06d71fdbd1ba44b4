"""Training a feature drafter: every position of a text at once, and steps further ahead on what it made itself.

At decoding the second drafted token has no state of the target to go by, only the drafter's own. So each position is
trained along several steps: in step s entry j is made of what step s - 1 said at j - 1, and sees the entries that it would
see there: those of step 1 up to j - s + 1, and one of each later step (HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from viasd.feature import FUSE, FeatureShape
from viasd.heads import unit
from viasd.layered import LayeredModel
from viasd.search.fit.corpus import Batch
from viasd.search.fit.draftloss import Judged, judge
from viasd.search.fit.teaching import Teacher


class FeatureStack(nn.Module):
    """A feature drafter while it is trained: weights in fp32, products in bf16 where the target is.

    Args:
        model: The target.
        shape: Sizes.
        shortlist: Token ids ``[m]`` that can be drafted.
        steps: Steps ahead that are trained.
        seed: Of the initial weights.
    """

    def __init__(self, model: LayeredModel, shape: FeatureShape, shortlist: Tensor, steps: int, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.steps = steps
        self._model = model
        self._head = model.head_rows(shortlist)
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        self.fuse = nn.Linear(2 * shape.width, shape.width, bias=False)
        nn.init.normal_(self.fuse.weight, std=shape.width**-0.5)
        self.layers = shape.layers()
        torch.set_rng_state(state)
        self._rotary = LlamaRotaryEmbedding(shape.config)

    def weights(self) -> dict[str, Tensor]:
        """Its parameters by the names of `viasd.feature.FeatureDrafterFile`."""
        named = {f"layers.{name}": p.detach() for name, p in self.layers.named_parameters()}
        return {FUSE: self.fuse.weight.detach(), **named}

    def rows(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, d]`` -> logits over the shortlist, ``[n, m]``, by the target's own norm and head."""
        return self._model.readout(hidden.to(self._model.dtype)[None], self._head)

    def judged(self, batch: Batch, teacher: Teacher, weight: float) -> tuple[Judged, int] | None:
        """Every step along a batch, and how many positions that are; None where nothing is scored.

        Args:
            batch: Conversations.
            teacher: The target along them.
            weight: Of the acceptance loss.
        """
        states, sums = teacher.along(batch)
        # Entry j speaks about position j + 1. Those too near the beginning have no step of each kind.
        scored = batch.scored[:, 1:].clone()
        scored[:, : self.steps - 1] = False
        if not bool(scored.any()):
            return None
        device = self.fuse.weight.device
        outputs = self.outputs(states.to(device), batch.ids.to(device))
        place = scored.to(device)
        found = judge(
            self.rows,
            [output[place] for output in outputs],
            states[:, 1:][scored].to(device),
            sums[:, 1:][scored].to(device),
            self.rows,
            weight,
        )
        return found, int(scored.sum())

    def outputs(self, states: Tensor, ids: Tensor) -> list[Tensor]:
        """What every step says at every entry.

        Args:
            states: The target's hidden states ``[B, L, d]``.
            ids: Tokens ``[B, L]``.

        Returns:
            Per step ``[B, L - 1, d]``; entries before the step's first are of no meaning.
        """
        length = ids.shape[1] - 1
        embedded = unit(self._model.embed(ids[:, 1:].reshape(-1))[0].float()).unflatten(0, (-1, length))
        positions = torch.arange(length, device=ids.device)[None]
        rotation = self._rotary(embedded, positions)
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        outputs: list[Tensor] = []
        fed = states[:, :-1].float()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._model.dtype == torch.bfloat16):
            for _ in range(self.steps):
                hidden = self.fuse(torch.cat((unit(fed), embedded), dim=-1)).float()
                for layer, kept in zip(self.layers, seen, strict=True):
                    hidden = _through(layer, hidden, rotation, kept)
                outputs.append(hidden)
                fed = _later(hidden, 1)
        return outputs


def _through(layer: Any, hidden: Tensor, rotation: tuple[Tensor, Tensor], seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A layer over entries ``[B, L, d]`` of one step; `seen` holds keys and values of the steps before and gets its own."""
    attention = layer.self_attn
    normed = layer.input_layernorm(hidden)
    query, key, value = (
        product(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for product in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    groups = query.shape[1] // key.shape[1]
    seen.append((key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)))
    out = _attended(query, seen, attention.scaling).transpose(1, 2).flatten(2)
    hidden = hidden + attention.o_proj(out)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def _attended(query: Tensor, seen: Sequence[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Attention of a step's entries ``[B, H, L, D]`` over those it would see at decoding."""
    keys, values = seen[0]
    query = query.to(values.dtype)
    keys = keys.to(values.dtype)
    if len(seen) == 1:
        return scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
    behind, length = len(seen) - 1, query.shape[2]
    place = torch.arange(length, device=query.device)
    hidden = place[None] > place[:, None] - behind
    scores = [(query @ keys.transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)]
    own = [(_later(k, behind - r), _later(v, behind - r)) for r, (k, v) in enumerate(seen[1:], 1)]
    scores += [(query * k.to(query.dtype)).float().sum(-1, keepdim=True) for k, _ in own]
    shares = torch.softmax(torch.cat(scores, dim=-1) * scale, dim=-1).to(values.dtype)
    out = shares[..., :length] @ values
    for r, (_, value) in enumerate(own):
        out = out + shares[..., length + r, None] * value
    return out


def _later(rows: Tensor, places: int) -> Tensor:
    """Rows ``[..., L, d]`` moved so many places to the right, zeros before them."""
    if not places:
        return rows
    return torch.cat((torch.zeros_like(rows[..., :places, :]), rows[..., : rows.shape[-2] - places, :]), dim=-2)
