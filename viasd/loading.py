"""Loads a target and its drafter: from the hub, folders, GGUF files or the packaged demo weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from viasd import hub
from viasd.checkpoints import LoadConfig, load_model, load_tokenizer
from viasd.drafters import file_of
from viasd.errors import OptionError, WeightsError
from viasd.feature import FeatureDrafterFile
from viasd.gguf_codes import read_codes
from viasd.hardware import resolve_device, resolve_dtype
from viasd.packaged import GGUF_NAME, PACKAGED, ensure_packaged
from viasd.pairs import DEFAULT_TARGET, MODEL_FREE_DRAFTERS, TINY, PairSpec, parse_target, split_drafter
from viasd.quantized import GroupCodes
from viasd.standalone import read_shortlist

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
        feature: The feature drafter, where that is one.
        shortlist: Token ids that the drafter model may propose, None for all.
        lookup_first: Whether lookup is asked before the drafter.
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
    feature: FeatureDrafterFile | None = None
    shortlist: Tensor | None = None
    lookup_first: bool = False


def load_pair_models(
    pair: PairSpec | tuple[str, str],
    config: LoadConfig | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> LoadedPair:
    """Load target and drafter.

    Args:
        pair: A registered pair, or (drafter, target) as hub ids, local folders or ``.gguf`` files. The target may also be a
            registered ``FAMILY:SIZE``, the drafter ``"lookup"``, ``"self"`` or the file of a feature drafter; ``lookup+``
            before it asks lookup first.
        config: How; None for all defaults.
        say: Receives one-line notices, such as where the weights come from.

    Raises:
        ViasdError: As `load_model` and `load_tokenizer`; WeightsError for packaged weights.
    """
    config = config or LoadConfig()
    feature_ref = None
    if isinstance(pair, PairSpec):
        lookup_first, drafter_id, target_id = pair.lookup_first, pair.drafter, f"{pair.family}:{pair.target}"
        target_ref, source = _resolve(pair, pair.target, pair.target_ref, config, say)
        target_id = pair.target_ref if source == "hub" else target_id
        drafter_ref = None
        if pair.drafter == TINY:
            feature_ref = str(file_of(f"{pair.family}:{pair.target}"))
        elif pair.drafter_ref is not None:
            drafter_ref, drafter_source = _resolve(pair, pair.drafter, pair.drafter_ref, config, say)
            drafter_id = pair.drafter_ref if drafter_source == "hub" else f"{pair.family}:{pair.drafter}"
    else:
        (lookup_first, drafter_id), target_id = split_drafter(pair[0]), pair[1]
        registered = None if Path(target_id).expanduser().exists() else parse_target(target_id)
        if registered is not None:
            target_ref, source = _resolve(registered, registered.target, registered.target_ref, config, say)
            target_id = registered.target_ref if source == "hub" else f"{registered.family}:{registered.target}"
        elif config.weights == "packaged":
            raise OptionError(
                f"weights='packaged' needs a registered pair or target such as {DEFAULT_TARGET}, but got {target_id}"
            )
        else:
            target_ref, source = target_id, "local" if Path(target_id).expanduser().exists() else "hub"
        drafter_ref = None if drafter_id in MODEL_FREE_DRAFTERS else drafter_id
        if drafter_ref is not None and drafter_ref.endswith(".safetensors"):
            feature_ref, drafter_ref = drafter_ref, None
    feature = None if feature_ref is None else FeatureDrafterFile.load(Path(feature_ref).expanduser())
    shortlist = None if drafter_ref is None else read_shortlist(drafter_ref)
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
        feature=feature,
        shortlist=shortlist,
        lookup_first=lookup_first,
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
