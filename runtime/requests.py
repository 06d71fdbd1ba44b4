"""What callers hand over, checked: options by name, mask and heads by what the command line takes, kinds of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import DecodingConfig, GenerationConfig
from viasd.sampling import SamplingConfig
from viasd.shipped import resolve_heads, resolve_mask

_SAMPLING = {f.name for f in fields(SamplingConfig)}
_DECODING = {f.name for f in fields(DecodingConfig)}
_OWN = {f.name for f in fields(GenerationConfig)} - {"sampling", "decoding"}


def make_config(options: Mapping[str, Any]) -> GenerationConfig:
    """One flat set of options -> a checked configuration.

    Args:
        options: Names of the fields of `GenerationConfig`, `SamplingConfig` and `DecodingConfig`.

    Raises:
        OptionError: If a name is unknown, a value out of range, or two options contradict each other.
    """
    unknown = sorted(set(options) - _SAMPLING - _DECODING - _OWN)
    if unknown:
        raise OptionError(f"unknown option '{unknown[0]}'; known are {', '.join(sorted(_SAMPLING | _DECODING | _OWN))}")
    stop = options.get("stop", ())
    own = {k: v for k, v in options.items() if k in _OWN}
    own["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    return GenerationConfig(
        sampling=SamplingConfig(**{k: v for k, v in options.items() if k in _SAMPLING}),
        decoding=DecodingConfig(**{k: v for k, v in options.items() if k in _DECODING}),
        **own,
    )


def settled_config(config: GenerationConfig | None, options: Mapping[str, Any]) -> GenerationConfig:
    """A ready configuration, or the one that options come to.

    Raises:
        OptionError: If there are both, or `make_config` refuses the options.
    """
    if config is not None and options:
        raise OptionError(f"give either config or single options, but got both (option '{next(iter(options))}')")
    return config or make_config(options)


def resolved(
    pair: Pair, mask: LayerMask | str | None, heads: LightHeads | str | None, *, exiting: bool = False
) -> tuple[LayerMask | None, LightHeads | None]:
    """Mask and heads from what ``--mask`` and ``--heads`` take.

    Args:
        pair: The pair.
        mask: A mask, its name or file, or None.
        heads: Light heads, their name or file, or None. ``auto`` is looked for only where heads are needed.
        exiting: Whether the strategy needs heads.
    """
    if isinstance(mask, str):
        mask = resolve_mask(mask, pair.target.n_layers, pair.name)
    if heads == "auto":
        # A mask file may name its own.
        needed = exiting or (mask is not None and mask.prefix is not None and mask.heads is None)
        return mask, resolve_heads("auto", pair.name) if needed else None
    return mask, resolve_heads(heads, pair.name) if isinstance(heads, str) else heads


def check_prompt_kind(prompt: object) -> bool:
    """Whether a prompt is a chat (a sequence of messages).

    Raises:
        OptionError: If it is one, and a message lacks its role or content.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return False
    if len(prompt) and isinstance(prompt[0], dict):
        if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
            raise OptionError("chat messages must each have 'role' and 'content'")
        return True
    return False


def several(prompt: object) -> list[Any] | None:
    """The prompts, where there is a list of them: of texts, of chats, or of lists of token ids; None for a single one.

    Raises:
        OptionError: If a list has prompts and something else.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return None
    first = prompt[0]
    if not isinstance(first, str | list | tuple):
        return None
    bad = next((i for i, item in enumerate(prompt) if not isinstance(item, str | list | tuple)), None)
    if bad is not None:
        raise OptionError(
            f"prompt {bad} of {len(prompt)} is a {type(prompt[bad]).__name__}; expected text, messages or ids"
        )
    return list(prompt)
