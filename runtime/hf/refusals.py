"""What of a transformers request is honoured, and the refusal, by name, of everything else that would change the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process, stopping_criteria

from viasd.errors import OptionError

#: Settings that reach us as logits processors or stopping criteria, or are read by `viasd.runtime.hf`.
_HONOURED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings", "do_sample"),
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "renormalize_logits", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"),
    *("token_healing", "watermarking_config", "num_return_sequences", "output_scores", "output_logits"),
    *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    "num_assistant_tokens",
}
#: Settings that mean nothing without beams or an automatic compilation, and provenance.
_IDLE = {"early_stopping", "length_penalty", "disable_compile", "transformers_version"}
_ADVICE = {
    "num_beams": "beam search is not speculative decoding",
    "penalty_alpha": "contrastive search needs every candidate's hidden states",
    "dola_layers": "DoLa changes the target's own law",
    "guidance_scale": "guidance runs the model a second time for every token",
    "output_attentions": "attention weights are never made here",
    "output_hidden_states": "a draft's hidden states would be among them",
    "use_cache": "verifying drafts needs the cache",
    "cache_implementation": "the cache is viasd's own",
    "prompt_lookup_num_tokens": "without assistant_model the drafter is prompt lookup anyway; viasd_gamma says how long",
    "num_assistant_tokens_schedule": "blocks are as long as they pay, at most viasd_gamma",
    "assistant_confidence_threshold": "blocks are as long as they pay; viasd_options={'draft_min_prob': ...} is the like",
}

_ROW_BY_ROW = tuple(
    getattr(logits_process, name)
    for name in (
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "TemperatureLogitsWarper"),
        *("RepetitionPenaltyLogitsProcessor", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper"),
        *("MinPLogitsWarper", "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper"),
        *("NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        *("PrefixConstrainedLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
        *("InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty", "LogitNormalization"),
        *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "WatermarkLogitsProcessor"),
        "SynthIDTextWatermarkLogitsProcessor",
    )
)
_ENDS_ROWS = (
    stopping_criteria.MaxLengthCriteria,
    stopping_criteria.MaxTimeCriteria,
    stopping_criteria.StopStringCriteria,
    stopping_criteria.EosTokenCriteria,
)
#: What transformers prepares for its own loop. Everything else given to the model's forward is refused.
_PREPARED = {
    *("attention_mask", "position_ids", "logits_to_keep", "use_cache", "cache", "past_key_values"),
    *("output_attentions", "output_hidden_states"),  # refused as settings
}
_TYPES = ("token_type_ids", "mm_token_type_ids")


def check_settings(config: Any) -> None:
    """Refuses a generation config with a setting that is neither honoured nor without effect.

    Settings that this transformers knows and viasd does not are refused too, so that a new one is never ignored.

    Args:
        config: The `transformers.GenerationConfig` that `generate` has prepared.

    Raises:
        OptionError: Naming the setting.
    """
    plain = GenerationConfig()
    usual = {**vars(plain), **plain._get_default_generation_params()}
    for name in sorted(vars(plain)):
        if name.startswith("_") or name in _HONOURED | _IDLE:
            continue
        value = getattr(config, name)
        neutral = (None, False) if usual[name] is None else (None, usual[name])
        if value not in neutral and not (name == "cache_implementation" and value == "dynamic"):
            advice = _ADVICE.get(name, "it is not one that viasd honours")
            raise OptionError(f"viasd.hf.generate can't honour {name}={value!r}: {advice}; leave it out")


def check_arguments(model: Any, kwargs: Mapping[str, Any], others: Mapping[str, Any], synced: bool | None) -> None:
    """Refuses what a model's forward would have been given and viasd's passes can't take.

    Args:
        model: The target.
        kwargs: What `generate` has prepared for the forward.
        others: What the caller gave it.
        synced: `synced_gpus`.

    Raises:
        OptionError: Naming the argument.
    """
    if model.config.is_encoder_decoder:
        raise OptionError(
            f"viasd.hf.generate decodes decoder-only models, but {type(model).__name__} has an encoder too"
        )
    if synced:
        raise OptionError("viasd.hf.generate can't honour synced_gpus: it decodes in one process; leave it out")
    for name in ("past_key_values", "cache"):
        own = kwargs.get(name)
        if others.get(name) is not None or getattr(own, "_is_user_defined", False) or (own and own.get_seq_length()):
            raise OptionError(
                f"viasd.hf.generate can't continue from {name}: the cache is viasd's own; give the whole text as input_ids"
            )
    unknown = [
        name
        for name, value in kwargs.items()
        # Types that are all 0 say "plain text", as a tokenizer does unasked.
        if value is not None and name not in _PREPARED and not (name in _TYPES and not bool(value.any()))
    ]
    if unknown:
        raise OptionError(
            f"viasd.hf.generate takes input_ids and attention_mask, but was given {unknown[0]}, which its passes can't use; "
            "leave it out"
        )


def left_padding(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> list[int]:
    """Number of padding tokens in front of each row.

    Args:
        ids: ``[B, n]``.
        mask: Attention mask ``[B, n]``, None where there is no padding.
        positions: Position ids ``[B, n]``, or the same row ``[n]`` several times, or None.

    Raises:
        OptionError: If a row is padded elsewhere than in front, is nothing but padding, or has positions of its own.
    """
    if mask is None:
        mask = torch.ones_like(ids)
    if positions is None:
        positions = (mask != 0).long().cumsum(-1) - 1
    for name, given in (("attention_mask", mask), ("position_ids, as attention_mask,", positions)):
        if given.dim() != 2 or given.shape[1] != ids.shape[1]:
            raise OptionError(
                f"{name} must have the shape of input_ids, {list(ids.shape)}, but has {list(given.shape)}"
            )
    seen = mask != 0
    if not bool((seen[:, 1:] >= seen[:, :-1]).all()) or not bool(seen[:, -1].all()):
        raise OptionError(
            "attention_mask must be zeros, then ones: padding belongs in front (padding_side='left' of the tokenizer), and "
            "every row needs a token"
        )
    if positions.shape[0] != ids.shape[0]:
        positions = positions[:1]  # one row for all, repeated where several sequences of a prompt were asked for
    if bool((positions != seen.long().cumsum(-1) - 1)[seen].any()):
        raise OptionError(
            "viasd.hf.generate can't honour position_ids of your own: positions are counted from each row's first token; "
            "leave them out"
        )
    return [int(n) for n in ids.shape[1] - seen.sum(-1)]


def check_batch(rows: int, processors: Sequence[Any], criteria: Sequence[Any], streamer: Any | None) -> None:
    """Refuses what can't be had of rows that go on each at a pace of its own.

    Args:
        rows: Rows of the batch, several returned sequences of one prompt included.
        processors: The prepared logits processors.
        criteria: The prepared stopping criteria.
        streamer: The streamer, or None.

    Raises:
        OptionError: Naming what is in the way.
    """
    guided = next((p for p in processors if "Guidance" in type(p).__name__), None)
    if guided is not None:
        raise OptionError(f"viasd.hf.generate can't honour {type(guided).__name__}: {_ADVICE['guidance_scale']}")
    if rows == 1:
        return
    paced = f"{rows} rows go on each at its own pace"
    if streamer is not None:
        raise OptionError(f"streamer needs a single row, but {paced}; leave it out, or call generate once a row")
    for kind, found, known in (
        ("logits processor", processors, _ROW_BY_ROW),
        ("stopping criterion", criteria, _ENDS_ROWS),
    ):
        other = next((f for f in found if type(f) not in known), None)
        if other is not None:
            name = getattr(other, "__name__", type(other).__name__)
            raise OptionError(
                f"{kind} {name} may want to see the whole batch, but {paced}; call generate once a row to use it"
            )
    if not any(hasattr(c, "eos_token_id") for c in criteria) and any(
        type(c) is not stopping_criteria.MaxLengthCriteria for c in criteria
    ):
        raise OptionError(
            "without eos_token_id, rows that have ended go on until all have, which viasd does not do; set eos_token_id and "
            "pad_token_id, or call generate once a row"
        )
