"""From the hidden states after the last layer to logits: final norm, LM head, and what a family does to its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from viasd.forms import ModelProducts
from viasd.kernels import build
from viasd.kernels.matrices import MOST_TOKENS, NativeProduct, product_obstacle
from viasd.kernels.native import NativeLayer, NativeReadout
from viasd.lean import LeanLayer, Norm, untouched
from viasd.products import Dense, Product, padded

# What families do to their logits after the head.
_LOGIT_CHANGES = ("logits_scaling", "logit_scale", "final_logit_softcapping")


class Readout:
    """The readout of one model.

    Args:
        model: The causal LM.
        decoder: Its decoder.
        last: The form in which its last layer runs; the norm is written out, and kernels are used, where they are there.
        vocabulary: Logit rows that stand for real tokens; None keeps all.
        weights: See `viasd.layered.LayeredModel`.
        modules: Whether norm and head run through their modules whatever they are.

    Attributes:
        vocabulary: Logit rows.
    """

    def __init__(
        self,
        model: Any,
        decoder: Any,
        last: LeanLayer | NativeLayer | None,
        vocabulary: int | None,
        weights: ModelProducts | None,
        *,
        modules: bool,
    ) -> None:
        self._config: Any = decoder.config
        self._dtype: torch.dtype = decoder.embed_tokens.weight.dtype
        self._norm_module: nn.Module = decoder.norm
        self._head_module: Any = model.get_output_embeddings()
        rows = self._head_module.weight.shape[0] if hasattr(self._head_module, "weight") else self._config.vocab_size
        self.vocabulary: int = min(rows, vocabulary or rows)
        self._plain = type(self._head_module) is nn.Linear and untouched(self._head_module)
        self._norm: Callable[[Tensor], Tensor] = self._norm_module
        self._head: Product | None = None  # None: the module runs
        replaced = None if weights is None else weights.head
        if not modules and (replaced is not None or self._plain):
            self._head = replaced or Dense(self._head_module.weight.detach(), self._head_module.bias)
            norm = self._norm_module
            if last is not None and type(norm) is type(decoder.layers[-1].input_layernorm) and untouched(norm):
                self._norm = Norm(norm)
        self._native = self._by_kernel() if isinstance(last, NativeLayer) else None
        # Looked up once: attributes of a config are slow to read.
        self._changes = {name: getattr(self._config, name, None) for name in _LOGIT_CHANGES}

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads."""
        head = self._head_module.parameters() if self._head is None else self._head.tensors
        return [*self._norm_module.parameters(), *head]

    def __call__(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None, *, steady: bool = False
    ) -> Tensor:
        """See `viasd.layered.LayeredModel.readout`."""
        logits = self._logits(hidden, steady) if head is None else head(self._norm(hidden[0]))
        return self._finished(logits[:, : self.vocabulary])

    def short(self, words: Tensor) -> Callable[[Tensor, bool], Tensor]:
        """See `viasd.layered.LayeredModel.short_readout`."""
        head = self.rows(words)
        native: NativeReadout | None = None
        if isinstance(head, NativeProduct) and isinstance(self._norm, Norm):
            native = NativeReadout(self._norm, head.product, len(words), build.load())

        def read(hidden: Tensor, steady: bool) -> Tensor:
            done = None if native is None else native(hidden, steady)
            if done is not None:
                return self._finished(self._rounded(done))
            longest = self.steady_rows if steady else None
            parts = [self(piece, head) for piece in hidden.split(longest or hidden.shape[1], dim=1)]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return read

    def _finished(self, logits: Tensor) -> Tensor:
        """What the family does to its logits, and the cast."""
        if scaling := self._changes["logits_scaling"]:
            logits = logits / scaling
        if scale := self._changes["logit_scale"]:
            logits = logits * scale
        if softcap := self._changes["final_logit_softcapping"]:
            logits = torch.tanh(logits / softcap) * softcap
        return logits.to(torch.float32, memory_format=torch.contiguous_format)

    def rows(self, rows: Tensor | None) -> Callable[[Tensor], Tensor]:
        """See `viasd.layered.LayeredModel.head_rows`."""
        weight, bias = getattr(self._head_module, "weight", None), getattr(self._head_module, "bias", None)
        if rows is not None and self._plain and weight is not None and not weight.is_meta:
            index = rows.to(weight.device)
            return self.product(Dense(weight.detach()[index], None if bias is None else bias.detach()[index]))
        whole = self._head_module if self._head is None else self.product(self._head)
        if rows is None:
            return lambda normed: whole(normed)[:, : self.vocabulary]
        return lambda normed: whole(normed)[:, rows.to(normed.device)]

    def product(self, product: Product) -> Callable[[Tensor], Tensor]:
        """See `viasd.layered.LayeredModel.product`."""
        if self._native is not None and len(product.matrices) == 1 and product_obstacle(product) is None:
            return NativeProduct(product, build.load())
        return lambda rows: product(padded(rows, product))[: rows.shape[0]]

    @property
    def steady_rows(self) -> int | None:
        """See `viasd.layered.LayeredModel.steady_rows`."""
        return None if self._native is None else MOST_TOKENS

    def _logits(self, hidden: Tensor, steady: bool) -> Tensor:
        if self._native is not None and (done := self._native(hidden, steady)) is not None:
            return self._rounded(done)
        if self._head is None:
            logits: Tensor = self._head_module(self._norm(hidden))[0]
            return logits
        return self._head(padded(self._norm(hidden[0]), self._head))[: hidden.shape[1]]

    def _rounded(self, logits: Tensor) -> Tensor:
        """Logits of a kernel; what a family does to them is rounded as its own forward would round it."""
        return logits.to(self._dtype) if any(self._changes.values()) else logits

    def _by_kernel(self) -> NativeReadout | None:
        norm, head = self._norm, self._head
        if head is None or not isinstance(norm, Norm) or product_obstacle(head) or len(head.matrices) != 1:
            return None
        return NativeReadout(norm, head, self.vocabulary, build.load())
