"""From viasd's own arguments, and what transformers has prepared, to pair, mask and configuration of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import StoppingCriteriaList

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.config import DecodingConfig, GenerationConfig, plan
from viasd.runtime.hf.driven import kept, target_and_assistant
from viasd.runtime.names import MASKED, MODELESS, UNDRAFTED
from viasd.sampling import SamplingConfig
from viasd.shipped import resolve_mask

_DECODING = {f.name for f in fields(DecodingConfig)}
_NAMED = ("strategy", "mode", "gamma")
_ASSISTANT_TOKENS = (None, 20)  # transformers' defaults of `num_assistant_tokens`
_WORDS = ("lookup", "self")


@dataclass(frozen=True)
class Own:
    """Viasd's own arguments of a request, as given; see `viasd.runtime.hf.decode.generate`."""

    mask: LayerMask | str | None
    mode: str | None
    strategy: str
    gamma: int | None
    heads: LightHeads | str | None
    options: Mapping[str, Any]

    def as_arguments(self) -> dict[str, Any]:
        """By the names under which they are given."""
        return {f"viasd_{f.name}": getattr(self, f.name) for f in fields(self)}


class Tokenless:
    """Stands where a pair has its tokenizer: nothing is known of the text, so there is none."""

    added_tokens_decoder: Mapping[int, Any] = {}
    chat_template = None

    def convert_ids_to_tokens(self, token: int) -> None:
        """No name."""

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """No text."""
        return ""


def pair_of(model: Any, assistant: Any, tokenizer: Any, assistant_tokenizer: Any, ends: frozenset[int]) -> Pair:
    """The pair of a request.

    Args:
        model: The target.
        assistant: The drafter: a model, ``self``, or ``lookup`` and None, which are the same.
        tokenizer: The target's tokenizer, where it is known.
        assistant_tokenizer: The drafter's, likewise.
        ends: End-of-sequence tokens of the request.

    Raises:
        OptionError: If the drafter is another word, or see `target_and_assistant`.
        ViasdError: See there.
    """
    if isinstance(assistant, str) and assistant not in _WORDS:
        raise OptionError(f"assistant_model must be a model, 'lookup' or 'self', but got '{assistant}'")
    kind = assistant or "lookup" if assistant is None or isinstance(assistant, str) else "model"
    small = assistant if kind == "model" else None
    target, drafter = target_and_assistant(model, small, tokenizer, assistant_tokenizer)
    identity = getattr(model.config, "name_or_path", "") or type(model).__name__
    return Pair(
        name=f"{kind if small is None else type(small).__name__} -> {identity}",
        target=target,
        tokenizer=tokenizer if tokenizer is not None else Tokenless(),
        drafter=drafter,
        drafter_kind=kind,
        target_id=identity,
        eos_ids=ends,
        measured=kept(model).measured.setdefault(drafter or target, {}).setdefault(kind, {}),
    )


def slim_mask(own: Own, pair: Pair) -> LayerMask | None:
    """The mask that a request names.

    Raises:
        OptionError: If its strategy has no slim verifier, or the mask is left to be found.
        MaskError: If there is no such mask.
    """
    if own.mask is None or own.mask == "none":
        return None
    if own.mask == "auto":
        raise OptionError(
            "nothing says which shipped mask is this model's; name one, such as viasd_mask='smollm2-135m.skip20'"
        )
    if own.strategy not in MASKED or (own.strategy in ("auto", "cascade") and own.options.get("tiers") == "2"):
        raise OptionError(
            f"viasd_mask is for a slim verifier, which strategy {own.strategy} does not have as asked; leave it out, or use "
            "viasd_strategy='cascade'"
        )
    return resolve_mask(own.mask, pair.target.n_layers, None) if isinstance(own.mask, str) else own.mask


def configured(
    own: Own, pair: Pair, assistant: Any, mask: LayerMask | None, settings: Any, room: int, text: int
) -> GenerationConfig:
    """The configuration of a request, its seed drawn from torch's generator where anything is drawn at all.

    Args:
        own: Viasd's own arguments.
        pair: The pair.
        assistant: `assistant_model` as it was given.
        mask: The mask, or None.
        settings: The generation config that transformers has prepared.
        room: Tokens that may be generated.
        text: Tokens of the longest row, without padding.

    Raises:
        OptionError: If arguments contradict each other, or the context is too short.
    """
    if text + room > pair.target.context_length:
        raise OptionError(
            f"prompt and answer may come to {text + room} tokens, but {pair.target_id} takes {pair.target.context_length} "
            "in all; lower max_new_tokens (or max_length)"
        )
    sampled = bool(settings.do_sample)
    decoding = _decoding(own, mask, settings, sampled=sampled, knows_text=not isinstance(pair.tokenizer, Tokenless))
    drafting = decoding.strategy not in (*UNDRAFTED, "self-sd")
    if assistant is not None and not drafting:
        raise OptionError(f"strategy {decoding.strategy} has no use for assistant_model; leave it out")
    drawn = sampled or not plan(decoding, has_mask=mask is not None).lossless
    return GenerationConfig(
        max_new_tokens=room,
        sampling=SamplingConfig(temperature=1.0 if sampled else 0.0),
        decoding=decoding,
        # Plain greedy decoding leaves torch's generator alone, and so does this.
        seed=int(torch.randint(2**31 - 1, ()).item()) if drawn else 0,
    )


def _decoding(own: Own, mask: LayerMask | None, settings: Any, *, sampled: bool, knows_text: bool) -> DecodingConfig:
    options = dict(own.options)
    for name in options:
        if name in _NAMED:
            raise OptionError(f"give {name} as viasd_{name}, not in viasd_options")
        if name not in _DECODING:
            known = ", ".join(sorted(_DECODING.difference(_NAMED)))
            raise OptionError(f"viasd_options has an unknown entry '{name}'; known are {known}")
    options["strategy"] = own.strategy
    if own.gamma is not None:
        options["gamma"] = own.gamma
    elif settings.num_assistant_tokens not in _ASSISTANT_TOKENS:
        options["gamma"] = int(settings.num_assistant_tokens)
    if own.mode is not None:
        options["mode"] = own.mode
    elif own.strategy not in MODELESS and options.get("verify") != "off":
        options["mode"] = "lossless"
    if mask is not None and own.strategy in ("auto", "cascade"):
        options.setdefault("tiers", "3")
        if options["tiers"] == "auto" and not knows_text:
            raise OptionError(
                "tiers 'auto' lets the model write a little text, for which it takes a tokenizer: "
                "viasd.hf.generate(model, ..., tokenizer=...); or leave it out"
            )
    elif sampled and own.strategy in ("auto", "sd"):
        # Blocks of a length that follows from measured times would draw other numbers on another day.
        options.setdefault("draft_length", "fixed")
    return DecodingConfig(**options)


def room_of(criteria: StoppingCriteriaList, length: int) -> int:
    """Tokens that may be generated after rows of so many.

    Raises:
        OptionError: If nothing limits them.
    """
    if criteria.max_length is None:
        raise OptionError("nothing limits the answer; give max_new_tokens")
    return criteria.max_length - length
