"""The loading probe: a model is either driven exactly as its own forward drives it, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from viasd.attention import Segment
from viasd.errors import UnsupportedModelError
from viasd.layered import LayeredModel
from viasd.quantized import GroupCodes, check_quantized, quantize, release

_PROBE_TOKENS = 12
_PROBE_SPLIT = 5  # second piece starts here, so that the probe also crosses a cache

# Root mean square of the difference over that of the logits. fp32 leaves rounding only; 16-bit types differ by the order
# in which fused and written-out attention round, which grows with depth.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.float16: 0.03, torch.bfloat16: 0.10}


def load_layered(
    model: nn.Module,
    *,
    kernel: str = "auto",
    vocabulary: int | None = None,
    layers: str = "auto",
    quantization: str | None = None,
    codes: Mapping[str, GroupCodes] | None = None,
    compile: bool = False,
) -> LayeredModel:
    """Wraps a model and probes it.

    Args:
        model: A Hugging Face causal LM in eval mode.
        kernel: See `LayeredModel`.
        vocabulary: See `LayeredModel`.
        layers: See `LayeredModel`.
        quantization: ``int8`` or ``int4`` (see `viasd.quantized`), which takes the model's own weights away.
        codes: See `viasd.quantized.quantize`.
        compile: See `LayeredModel.compile`. What is probed is the ordinary pass.

    Raises:
        UnsupportedModelError: If the model can't be driven layer by layer, naming what differs.
        OptionError: See `LayeredModel`, `LayeredModel.compile` and `viasd.quantized.check_quantized`.
        LoadError: See `viasd.quantized.check_quantized`.
    """
    weights = None
    if quantization is not None:
        check_quantized(quantization, layers, next(model.parameters()).device)
        weights = quantize(model, quantization, codes, kernels=layers != "fused" and not compile)
    layered = LayeredModel(model, kernel=kernel, vocabulary=vocabulary, layers=layers, weights=weights)
    probe(layered)
    if weights is not None:
        release(model, weights)
    if compile:
        layered.compile()
    return layered


@torch.inference_mode()
def probe(layered: LayeredModel) -> float:
    """Runs a short prompt through the model's own forward and through ours, whole and in two pieces.

    Also finds out whether the model scales its embeddings outside the embedding module.

    Returns:
        The larger of the two relative differences of the logits (root mean square over root mean square).

    Raises:
        UnsupportedModelError: If they disagree beyond the tolerance of the dtype.
    """
    rows = layered.vocabulary
    ids = [(7 + 31 * i) % rows for i in range(_PROBE_TOKENS)]
    reference, inputs = _own_forward(layered, ids)
    layered.embed_scale = _embedding_scale(layered, ids, inputs[0])
    _check_windows(layered, ids)
    tolerance = _TOLERANCE.get(layered.dtype, 0.10)
    worst = 0.0
    for pieces in ([_PROBE_TOKENS], [_PROBE_SPLIT, _PROBE_TOKENS - _PROBE_SPLIT]):
        logits, hidden = _our_forward(layered, ids, pieces)
        difference = _relative(logits, reference)
        worst = max(worst, difference)
        if not difference <= tolerance:
            where = next(
                (i for i in range(1, layered.n_layers) if not _relative(hidden[i], inputs[i]) <= tolerance),
                layered.n_layers,
            )
            place = f"from layer {where - 1} on" if where < layered.n_layers else "in the last layer or the readout"
            how = "in one piece" if len(pieces) == 1 else "in two pieces"
            raise UnsupportedModelError(
                f"{layered.name} computes something our layer loop does not: run {how}, its logits differ by "
                f"{difference:.2g} (relative; {tolerance:g} allowed in {str(layered.dtype).removeprefix('torch.')}), "
                f"{place} ({type(layered.layers[min(where, layered.n_layers) - 1]).__name__})"
            )
    return worst


def _own_forward(layered: LayeredModel, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits ``[n, V]`` of the model's own forward and what it fed into each layer."""
    inputs: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])

    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layered.layers]
    try:
        row = torch.tensor([ids], device=layered.device)
        logits = layered.model(input_ids=row, use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits[:, : layered.vocabulary].float(), inputs


def _our_forward(layered: LayeredModel, ids: list[int], pieces: list[int]) -> tuple[Tensor, dict[int, Tensor]]:
    kv = layered.new_kv()
    logits, hidden, start = [], [], 0
    for length in pieces:
        step = layered.step([Segment(kv, start, length)])
        out, captured = layered.run(
            layered.embed(ids[start : start + length]),
            range(layered.n_layers),
            step,
            capture=range(layered.n_layers),
        )
        logits.append(layered.readout(out))
        hidden.append(captured)
        start += length
    joined = {i: torch.cat([h[i].to(hidden[0][i].device) for h in hidden], dim=1) for i in range(layered.n_layers)}
    return torch.cat(logits), joined


def _embedding_scale(layered: LayeredModel, ids: list[int], first_input: Tensor) -> Tensor | None:
    layered.embed_scale = None
    plain = layered.embed(ids)
    if torch.equal(plain, first_input):
        return None
    multiplier = getattr(layered.config, "embedding_multiplier", None) or layered.config.hidden_size**0.5
    scale = torch.tensor(multiplier, dtype=plain.dtype, device=plain.device)
    if torch.equal(plain * scale, first_input):
        return scale
    raise UnsupportedModelError(
        f"{layered.name} changes its embeddings before the first layer in a way that is not known here "
        "(neither unchanged nor scaled); this architecture can't be driven layer by layer"
    )


def _check_windows(layered: LayeredModel, ids: list[int]) -> None:
    """Every layer must ask for the window that its config names: a short prompt crosses none, so no logit would tell.

    A family that keeps its window in the mask alone, which we build ourselves, would be wrong beyond it.
    """
    step = layered.step([Segment(layered.new_kv(), 0, len(ids))])
    layered.run(layered.embed(ids), range(layered.n_layers), step)
    config = layered.config
    typed = getattr(config, "layer_types", None) is not None
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    for index, kind in enumerate(layered.layer_types[: layered.n_layers]):
        expected = window if kind == "sliding_attention" or not typed else None
        if step.windows.get(index) != expected:
            raise UnsupportedModelError(
                f"{layered.name}: layer {index} attends within a window of {step.windows.get(index)} by its module and of "
                f"{expected} by the config; this architecture would be wrong beyond the window"
            )


def _relative(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = ours.float(), theirs.to(ours.device).float()
    return float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt().clamp_min(1e-12))
