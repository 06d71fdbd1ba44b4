"""`LayeredModel`: drive any Hugging Face decoder layer by layer, with our loop, our KV and our attention call.

The layer modules stay Hugging Face's own, so quantised and sharded weights keep working, and no family's forward is
copied. What differs between families (which keyword carries the cache, rotary embeddings per layer type, a scale on the
embeddings) is read from the modules once, and `viasd.probe` checks the result against the model's own forward.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from viasd.attention import ATTENTION_NAME, Segment, Step, attention
from viasd.compiled import BACKEND, BUCKETS, Backend, CompiledSteps
from viasd.decoder import check_layers, find_decoder, layer_types_of
from viasd.errors import OptionError, UnsupportedModelError
from viasd.forms import ModelProducts, layer_forms
from viasd.kernels.matrices import MOST_TOKENS, NativeInt4
from viasd.kernels.native import NativeLayer, run_layers
from viasd.kv import SequenceKV
from viasd.lean import obstacle
from viasd.products import Product
from viasd.readout import Readout
from viasd.rotary import RotaryTable, Rotation

AttentionInterface.register(ATTENTION_NAME, attention)

_KERNELS = ("auto", "sdpa", "eager")
# Rotary embeddings whose frequencies depend on the sequence's length: keys already stored would go stale beyond it.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


# Held while a model's own modules run with our attention: another thread that restored the setting in the middle of it would
# make them attend over the new keys alone.
_POINTING = threading.RLock()


class LayeredModel:
    """A causal language model as `embed`, `run` over chosen layers, and `readout`.

    Args:
        model: A Hugging Face causal LM in eval mode whose decoder has ``embed_tokens, layers, norm, rotary_emb``.
        kernel: ``sdpa`` (fused attention), ``eager`` (written out), or ``auto`` (sdpa wherever the model allows it).
        vocabulary: Number of logit rows that stand for real tokens; padded rows beyond it are cut. None keeps all.
        layers: ``auto`` runs layers of known families written out (`viasd.lean`), on a CPU by kernels of our own where these
            can be had (`viasd.kernels`), the others through their modules; ``hf`` runs all through their modules; ``fused``
            writes all out with their weights laid together (`viasd.fuse`), without the kernels, and refuses a model that has
            a layer which can't be; ``native`` refuses a model that has a layer which the kernels can't run.
        weights: Matrix products that stand for the linear layers (`viasd.quantized`); None takes the model's own.

    Raises:
        UnsupportedModelError: If the model has another shape, keeps a state that can't be rolled back, or is training.
        OptionError: If `kernel` or `layers` is unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        kernel: str = "auto",
        vocabulary: int | None = None,
        layers: str = "auto",
        weights: ModelProducts | None = None,
    ) -> None:
        if kernel not in _KERNELS:
            raise OptionError(f"attention kernel must be one of {', '.join(_KERNELS)}, but got '{kernel}'")
        self.model = model
        self.name = type(model).__name__
        self.kernel = "sdpa" if kernel == "auto" else kernel
        self.decoder = find_decoder(model)
        self.layers: Sequence[nn.Module] = list(self.decoder.layers)
        self.n_layers = len(self.layers)
        self.config: Any = self.decoder.config
        self.layer_types = layer_types_of(self.name, self.config, self.layers)
        self.embed_scale: Tensor | None = None  # set by the probe where the model's forward scales outside embed_tokens
        self._lean = layer_forms(self.name, self.layers, layers, weights)
        # Those that one call can run together: of one dtype.
        native = {index: layer for index, layer in enumerate(self._lean) if isinstance(layer, NativeLayer)}
        self._native = native if len({layer.dtype for layer in native.values()}) == 1 else {}
        self._most = min((layer.most for layer in native.values()), default=MOST_TOKENS)
        for layer in native.values():  # a pass runs by the kernels in all of them or in none
            layer.most = self._most
        if model.training:
            raise UnsupportedModelError(f"expected {self.name} in eval mode, but it is training; call model.eval()")
        check_layers(self.name, self.layers)
        attending: list[Any] = [layer.self_attn for layer in self.layers]
        self._attention_configs = list({id(m.config): m.config for m in attending}.values())
        parameters = inspect.signature(self.layers[0].forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._rotary_takes_type = "layer_type" in inspect.signature(self.decoder.rotary_emb.forward).parameters
        self._readout = Readout(model, self.decoder, self._lean[-1], vocabulary, weights, modules=layers == "hf")
        self._rotations = RotaryTable(self._rotary, self.context_length)
        self._compiled: CompiledSteps | None = None

    @property
    def vocabulary(self) -> int:
        """Logit rows."""
        return self._readout.vocabulary

    @property
    def device(self) -> torch.device:
        """Device on which token ids enter."""
        return self.decoder.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the hidden states."""
        return self.decoder.embed_tokens.weight.dtype

    @property
    def context_length(self) -> int:
        """Positions the model was made for."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        limit = int(self.config.max_position_embeddings)
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, int(rope.get("original_max_position_embeddings", limit)))
        return limit

    @property
    def runs_parts(self) -> bool:
        """Whether attention and MLP of a layer can be run separately (every layer is of a family written out)."""
        return all(lean is not None for lean in self._lean)

    @property
    def form(self) -> str:
        """How its layers run, for provenance and for what is measured: ``hf``, or the layer's `form`; several joined by +.

        ``, compiled`` is added where passes of few tokens are.
        """
        compiled = self._compiled is not None and self._compiled.failure is None
        running = [layer.lean if compiled and isinstance(layer, NativeLayer) else layer for layer in self._lean]
        forms = "+".join(sorted({"hf" if layer is None else layer.form for layer in running}))
        return f"{forms}, compiled" if compiled else forms

    def compile(self, *, backend: Backend = BACKEND, buckets: Sequence[int] = BUCKETS) -> None:
        """Lets passes of few tokens of one sequence run as graphs of fixed shape from now on; see `viasd.compiled`.

        A graph is made when it is first needed, which takes the compiler's time. What can't be one (several sequences, many
        tokens) runs as before, and so does everything, after one warning, if torch can't compile this model here. Padding
        writes above the last token of a pass: what a cache held there is lost.

        Args:
            backend: Of `torch.compile`.
            buckets: Numbers of tokens that passes are padded to, for example 1 and block length + 1.

        Raises:
            OptionError: If a layer has to run through its module, layers lie on several devices, or int4 weights are
                laid out for the CPU kernels.
        """
        lean = [layer.lean if isinstance(layer, NativeLayer) else layer for layer in self._lean if layer is not None]
        if len(lean) < self.n_layers:
            index = self._lean.index(None)
            reason = obstacle(self.layers[index]) or "layers='hf'"
            raise OptionError(
                f"compile needs layers that are written out, but layer {index} of {self.name} can't be: {reason}"
            )
        if any(isinstance(product, NativeInt4) for layer in lean for product in layer.products):
            raise OptionError(
                "compile needs int4 weights in torch's own form, but these are laid out for the CPU kernels; load the model "
                "with compile=True, or with layers='fused'"
            )
        self._compiled = CompiledSteps(
            lean,
            self.layer_types,
            self._rotations,
            self.context_length,
            kernel=self.kernel,
            backend=backend,
            buckets=buckets,
        )

    @property
    def step_tensors(self) -> list[Tensor]:
        """Every weight that a pass over all layers has to read, readout included, as it is stored.

        Of the embedding only one row a token is read, unless it is tied, in which case it is the head.
        """
        found: list[Tensor] = []
        for layer, lean in zip(self.layers, self._lean, strict=True):
            if lean is None:
                found += [*layer.parameters(), *layer.buffers()]
            else:
                # The norms are the module's; weights and biases may be held in another form, or laid together.
                found += [p for name, p in layer.named_parameters() if "norm" in name] + lean.tensors
        found += self._readout.tensors
        return list({(t.data_ptr(), t.numel()): t for t in found}.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights held, each once however many tiers read it."""
        held = [*self.step_tensors, *(p for p in self.model.parameters() if not p.is_meta)]
        ends: dict[int, int] = {}
        for tensor in held:
            storage = tensor.untyped_storage()
            ends[storage.data_ptr()] = storage.nbytes()
        return sum(ends.values())

    def new_kv(self) -> SequenceKV:
        """An empty cache for one sequence."""
        return SequenceKV(self.n_layers, None if self._compiled is None else self._compiled.pool)

    def step(self, segments: Sequence[Segment]) -> Step:
        """Describes one packed pass over `segments`."""
        return Step(segments, self.device, self.kernel)

    def embed(self, ids: Sequence[int] | Tensor) -> Tensor:
        """Token ids (n of them) -> hidden states ``[1, n, d]``."""
        row = torch.as_tensor(ids, dtype=torch.long, device=self.device).reshape(1, -1)
        hidden: Tensor = self.decoder.embed_tokens(row)
        return hidden if self.embed_scale is None else hidden * self.embed_scale

    def run(
        self,
        hidden: Tensor,
        layers: Iterable[int],
        step: Step,
        capture: Iterable[int] = (),
        parts: Mapping[int, str] | None = None,
        stitches: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Runs hidden states through the named layers, in the order given.

        Args:
            hidden: ``[1, N, d]``, the packed tokens of `step`.
            layers: Indices of the layers to run. Layers left out are skipped: the hidden state passes them unchanged.
            step: Says which positions of which sequences these tokens are; their keys and values are stored there.
            capture: Layer indices whose *input* is wanted; ``n_layers`` names the state after the last layer.
            parts: Layers of which only ``attention`` or ``mlp`` runs (see `runs_parts`).
            stitches: What hidden states, once captured, go through before the layer of that index (see `viasd.stitch`).

        Returns:
            The hidden states ``[1, N, d]`` after the last layer run, and the captured inputs by layer index.
        """
        if self._compiled is not None:
            layers = tuple(layers)
            done = self._compiled.run(hidden, layers, step, tuple(capture), parts or {}, stitches or {})
            if done is not None:
                return done
        if len(step.segments) > 1 and self._native and len(pieces := self._pieces(hidden, step)) > 1:
            # Whether the kernels run a sequence's tokens must not depend on how many another one has.
            layers, capture = tuple(layers), tuple(capture)
            ran = [self.run(hidden[:, rows], layers, piece, capture, parts, stitches) for rows, piece in pieces]
            return torch.cat([states for states, _ in ran], dim=1), {
                index: torch.cat([states[index] for _, states in ran], dim=1) for index in ran[0][1]
            }
        wanted = set(capture)
        captured: dict[int, Tensor] = {}
        embeddings: dict[str, tuple[Tensor, Tensor]] = {}
        rotations: dict[str, Rotation] = {}
        halves = (parts or {}).keys()
        begins = wanted | halves | (stitches or {}).keys()
        with self._our_attention():
            for group in self._groups(layers, begins, halves, hidden, step):
                index = group[0]
                if index in wanted:
                    captured[index] = hidden
                if stitches and index in stitches:
                    hidden = stitches[index](hidden)
                kind, lean = self.layer_types[index], self._lean[index]
                for needed in {self.layer_types[i] for i in group} - rotations.keys() if lean is not None else ():
                    rotations[needed] = self._rotations.rotation(step, needed, hidden.device)
                if len(group) > 1:
                    turned = [rotations[self.layer_types[i]] for i in group]
                    hidden = run_layers([self._native[i] for i in group], hidden, turned, step)
                    continue
                if lean is not None:
                    hidden = lean(hidden, rotations[kind], step, parts.get(index) if parts else None)
                    continue
                if kind not in embeddings:
                    embeddings[kind] = self._rotary(step.positions.to(hidden.device), kind)
                if parts and index in parts:
                    raise UnsupportedModelError(
                        f"{self.name}: attention and MLP of a layer can't be skipped separately in this model; "
                        "use a mask of whole layers"
                    )
                out = self.layers[index](
                    hidden,
                    attention_mask=None,
                    position_embeddings=embeddings[kind],
                    position_ids=step.positions,
                    viasd_step=step,
                    **{self._cache_keyword: step},
                )
                hidden = out[0] if isinstance(out, tuple) else out
        if self.n_layers in wanted:
            captured[self.n_layers] = hidden
        return (stitches[self.n_layers](hidden) if stitches and self.n_layers in stitches else hidden), captured

    def _pieces(self, hidden: Tensor, step: Step) -> list[tuple[slice, Step]]:
        """A packed pass in parts of which the kernels run all or nothing."""
        mixed = type(step) is Step and hidden.shape[1] > self._most
        return step.pieces(self._most) if mixed else []

    def _groups(
        self, layers: Iterable[int], begins: AbstractSet[int], alone: AbstractSet[int], hidden: Tensor, step: Step
    ) -> list[list[int]]:
        """Layers in groups that the kernels run in one call: those of `begins` begin one, those of `alone` end it too."""
        first = next(iter(self._native.values()), None)
        if first is None or not first.takes(hidden, step):
            return [[index] for index in layers]
        groups: list[list[int]] = []
        joins = False
        for index in layers:
            native = index in self._native
            if joins and native and index not in begins:
                groups[-1].append(index)
            else:
                groups.append([index])
            joins = native and index not in alone
        return groups

    def readout(
        self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None, *, steady: bool = False
    ) -> Tensor:
        """Hidden states ``[1, n, d]`` after the last layer -> raw logits ``[n, vocabulary]`` in fp32.

        Final norm, LM head, and what the family does to its logits (softcap, scale), in the model's own dtype as its
        own forward does; then cut to the common vocabulary and cast.

        Args:
            hidden: The hidden states.
            head: Stands in the LM head's place (`viasd.heads`): normed rows ``[n, d]`` -> ``[n, m]``; the result then has
                its m columns.
            steady: The rows are of sequences that must not notice each other: where the CPU kernels run, they do so however
                many rows there are.
        """
        return self._readout(hidden, head, steady=steady)

    def head_rows(self, rows: Tensor | None) -> Callable[[Tensor], Tensor]:
        """The LM head cut to some words of the vocabulary: normed rows ``[n, d]`` -> ``[n, m]``, for `readout`.

        Args:
            rows: Token ids ``[m]``; None takes the whole vocabulary.
        """
        return self._readout.rows(rows)

    def short_readout(self, words: Tensor) -> Callable[[Tensor, bool], Tensor]:
        """`readout` by the LM head cut to some words: hidden states ``[1, n, d]`` and `steady` -> ``[n, m]`` in fp32.

        Args:
            words: Token ids ``[m]``.
        """
        return self._readout.short(words)

    def product(self, product: Product) -> Callable[[Tensor], Tensor]:
        """A product that belongs to a readout, ``[n, k]`` -> ``[n, o]``: by the CPU kernels where the model's own is."""
        return self._readout.product(product)

    @property
    def steady_rows(self) -> int | None:
        """Most rows that a readout with another head may have in one call without noticing each other (by the CPU kernels).

        None where torch's products run, which promise nothing of the kind.
        """
        return self._readout.steady_rows

    def _rotary(self, positions: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        rotary: Any = self.decoder.rotary_emb
        like = torch.empty(0, dtype=self.dtype, device=positions.device)
        cos, sin = rotary(like, positions, kind) if self._rotary_takes_type else rotary(like, positions)
        return cos, sin

    @contextmanager
    def _our_attention(self) -> Iterator[None]:
        """Points the model's attention at ours for the length of one pass, and back whatever happens."""
        if all(lean is not None for lean in self._lean):
            yield  # no module of the model's own runs, so nothing of it has to be pointed anywhere
            return
        with _POINTING:
            yield from self._pointed()

    def _pointed(self) -> Iterator[None]:
        before = [c._attn_implementation for c in self._attention_configs]
        try:
            for config in self._attention_configs:
                config._attn_implementation = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._attention_configs, before, strict=True):
                config._attn_implementation = name
