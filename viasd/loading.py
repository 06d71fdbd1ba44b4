"""Loads a target and its drafter: from the hub, folders, GGUF files or the packaged demo weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from viasd import hub
from viasd.checkpoints import LoadConfig, load_model, load_tokenizer
from viasd.errors import OptionError, WeightsError
from viasd.gguf_codes import read_codes
from viasd.hardware import resolve_device, resolve_dtype
from viasd.packaged import GGUF_NAME, PACKAGED, ensure_packaged
from viasd.pairs import MODEL_FREE_DRAFTERS, PairSpec
from viasd.quantized import GroupCodes

__all__ = [
    "LoadConfig",
    "LoadedPair",
    "load_model",
    "load_pair_models",
    "load_tokenizer",
    "resolve_device",
    "resolve_dtype",
]


@dataclass(frozen=True)
class LoadedPair:
    """A target, perhaps a drafter model, and where they came from.

    Attributes:
        target: In eval mode, on its device.
        target_tokenizer: Its tokenizer.
        drafter: The drafter model, None for ``lookup`` and ``self``.
        drafter_tokenizer: Its tokenizer, None likewise.
        target_id: Hub id, path, or ``FAMILY:SIZE`` of packaged weights.
        drafter_id: Likewise, or ``"lookup"`` or ``"self"``.
        source: Where the target came from: ``"hub"``, ``"local"`` or ``"packaged"``.
        has_chat_template: Whether the target's tokenizer can format a chat.
        dtype: Of the target's weights, for example ``"bfloat16"``.
        device: Of the target's first weights, for example ``"cuda:0"``.
        codes: 4-bit codes of the target's weights by name, where they are asked for and its GGUF file has such.
    """

    target: PreTrainedModel
    target_tokenizer: PreTrainedTokenizerBase
    drafter: PreTrainedModel | None
    drafter_tokenizer: PreTrainedTokenizerBase | None
    target_id: str
    drafter_id: str
    source: str
    has_chat_template: bool
    dtype: str
    device: str
    codes: dict[str, GroupCodes] | None = None


def load_pair_models(
    pair: PairSpec | tuple[str, str],
    config: LoadConfig | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> LoadedPair:
    """Load target and drafter.

    Args:
        pair: A registered pair, or (drafter, target) as hub ids, local folders or ``.gguf`` files; the drafter may
            also be ``"lookup"`` or ``"self"``.
        config: How; None for all defaults.
        say: Receives one-line notices, such as where the weights come from.

    Raises:
        ViasdError: As `load_model` and `load_tokenizer`; WeightsError for packaged weights.
    """
    config = config or LoadConfig()
    if isinstance(pair, PairSpec):
        drafter_id, target_id = pair.drafter, f"{pair.family}:{pair.target}"
        target_ref, source = _resolve(pair, pair.target, pair.target_ref, config, say)
        target_id = pair.target_ref if source == "hub" else target_id
        drafter_ref = None
        if pair.drafter_ref is not None:
            drafter_ref, drafter_source = _resolve(pair, pair.drafter, pair.drafter_ref, config, say)
            drafter_id = pair.drafter_ref if drafter_source == "hub" else f"{pair.family}:{pair.drafter}"
    else:
        if config.weights == "packaged":
            raise OptionError("weights='packaged' needs a pair name, but explicit drafter and target were given")
        drafter_id, target_id = pair
        target_ref, drafter_ref = target_id, None if drafter_id in MODEL_FREE_DRAFTERS else drafter_id
        source = "local" if Path(target_ref).expanduser().exists() else "hub"
    # Tokenizers first: they are small, and their faults show before gigabytes are read.
    target_tokenizer = load_tokenizer(target_ref, config)
    drafter_tokenizer = None if drafter_ref is None else load_tokenizer(drafter_ref, config)
    target = load_model(target_ref, config)
    drafter = None if drafter_ref is None else load_model(drafter_ref, _for_drafter(config))
    return LoadedPair(
        target=target,
        target_tokenizer=target_tokenizer,
        drafter=drafter,
        drafter_tokenizer=drafter_tokenizer,
        target_id=target_id,
        drafter_id=drafter_id,
        source=source,
        has_chat_template=bool(target_tokenizer.chat_template),
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        codes=_codes(target_ref, source) if config.quantization == "int4" else None,
    )


def _codes(ref: str, source: str) -> dict[str, GroupCodes] | None:
    """What a GGUF file, given or packaged, has of 4-bit codes."""
    path = Path(ref).expanduser() / GGUF_NAME if source == "packaged" else Path(ref).expanduser()
    return read_codes(path) if path.suffix == ".gguf" and path.is_file() else None


def _for_drafter(config: LoadConfig) -> LoadConfig:
    # The drafter is small: neither spread over devices nor quantised.
    return replace(
        config,
        device=config.drafter_device or config.device,
        dtype=config.drafter_dtype or config.dtype,
        device_map=None,
        quantization=None,
    )


def _resolve(pair: PairSpec, size: str, ref: str, config: LoadConfig, say: Callable[[str], None]) -> tuple[str, str]:
    """What to load for one size of a registered pair, and whether that is from the hub or packaged."""
    key = f"{pair.family}:{size}"
    if config.weights == "hub" or (config.weights == "auto" and (hub.is_cached(ref) or hub.is_reachable())):
        return ref, "hub"
    if key not in PACKAGED:
        if config.weights == "packaged":
            raise WeightsError(f"packaged weights exist for {', '.join(PACKAGED)}, but not for {key}")
        raise hub.unreachable(ref)
    if pair.base and not PACKAGED[key].base:
        raise WeightsError(
            f"the packaged weights of {key} are an instruct model, but --base was asked for; drop --base"
        )
    reason = "as asked" if config.weights == "packaged" else "the model hub can't be reached"
    say(f"using packaged weights for {key} ({reason})")
    if PACKAGED[key].base and not pair.base:
        say(f"the packaged weights of {key} are the base model, not the instruct one: no chat, plain completion")
    return str(ensure_packaged(key, quiet=config.quiet, say=say)), "packaged"
