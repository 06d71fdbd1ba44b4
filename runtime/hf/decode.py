"""`generate`: decoding in tiers as the `custom_generate` of `model.generate`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    StoppingCriteriaList,
    StopStringCriteria,
)

from viasd.errors import OptionError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.runtime.assembly import alpha_of
from viasd.runtime.hf.caller import given_to_generate
from viasd.runtime.hf.options import Own, configured, pair_of, room_of, slim_mask
from viasd.runtime.hf.prepared import PreparedSampler, of_row
from viasd.runtime.hf.refusals import check_arguments, check_batch, check_settings, left_padding
from viasd.runtime.hf.rows import Answer, RowSession, Wanted, end_tokens
from viasd.runtime.hf.together import Crowd, decoded
from viasd.runtime.metrics import Counters
from viasd.runtime.result import Result, describe_loss
from viasd.shipped import resolve_heads

_log = logging.getLogger(__name__)


class LossyWarning(UserWarning):
    """Says, once a call, that an output is not the model's own, and how far it may be from it.

    Either a lossy mode ran, or a confident readout made another target of the model.
    """


def generate(
    model: Any,
    input_ids: Tensor | None = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    generation_config: Any = None,
    synced_gpus: bool | None = None,
    streamer: Any = None,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    viasd_mask: LayerMask | str | None = None,
    viasd_mode: str | None = None,
    viasd_strategy: str = "auto",
    viasd_gamma: int | None = None,
    viasd_heads: LightHeads | str | None = None,
    viasd_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decodes in tiers what `model.generate` was asked for: hand it over as ``custom_generate``, or call it in its place.

    ``model.generate(**inputs, custom_generate=viasd.hf.generate, ...)`` and ``viasd.hf.generate(model, **inputs, ...)`` do
    the same; the second form also takes `tokenizer` (for ``stop_strings``, which transformers does not let a callable have)
    and `assistant_tokenizer`. The model is only read.

    Args:
        model: A decoder-only causal LM in eval mode, wherever and however it was loaded.
        input_ids: ``[B, n]``, padded in front. Rows share their passes (but for `adadecode`); each leaves when it
            has ended.
        logits_processor: As for `model.generate`.
        stopping_criteria: As for `model.generate`; asked after every token.
        generation_config: As for `model.generate`. What is not honoured is refused by name.
        synced_gpus: Refused.
        streamer: As for `model.generate`, for a single row.
        assistant_model: A drafter with the same vocabulary; without one, prompt lookup drafts.
        tokenizer: The model's tokenizer.
        assistant_tokenizer: The drafter's, where the vocabularies differ in size; both maps are then compared.
        viasd_mask: Layers of the slim verifier: a mask file, the name of a shipped mask, ``even:0.45``, or a `LayerMask`.
            With one, the default strategy is ``cascade``, with all three tiers.
        viasd_mode: ``lossless`` (the default), ``bounded`` or ``via``. A lossy one warns once, by `LossyWarning`.
        viasd_strategy: ``auto``, ``plain``, ``sd``, ``cascade``, ``adadecode``, or one of the literature's.
        viasd_gamma: Longest drafted block.
        viasd_heads: Light heads, for ``adadecode`` and masks ``prefix:E``.
        viasd_options: Other fields of `viasd.runtime.config.DecodingConfig`, such as ``{"alpha": 0.2}``.
        **kwargs: What else `model.generate` takes.

    Returns:
        Token ids ``[B, n + m]``, or with ``return_dict_in_generate`` an output whose attribute `viasd` has a `Result` for
        every row (its text is empty), and whose cache is None.

    Raises:
        ViasdError: If anything of the request can't be done, naming it; before the first token.
    """
    own = Own(viasd_mask, viasd_mode, viasd_strategy, viasd_gamma, viasd_heads, viasd_options or {})
    if not hasattr(generation_config, "_eos_token_tensor"):
        # Not called by transformers' `generate`, which marks the config that it has prepared, but in its place.
        return _through_transformers(
            model,
            # These never reach a callable through transformers.
            partial(
                generate,
                assistant_model=assistant_model,
                tokenizer=tokenizer,
                assistant_tokenizer=assistant_tokenizer,
                **own.as_arguments(),
            ),
            tokenizer,
            input_ids=input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **kwargs,
        )
    given = given_to_generate(model)
    streamer = streamer if streamer is not None else given.streamer
    assistant = assistant_model if assistant_model is not None else given.assistant_model
    check_arguments(model, kwargs, given.others, synced_gpus or given.synced_gpus)
    check_settings(generation_config)
    assert input_ids is not None
    check_batch(input_ids.shape[0], logits_processor, stopping_criteria, streamer)
    padding = left_padding(input_ids, kwargs.get("attention_mask"), kwargs.get("position_ids"))
    pair = pair_of(model, assistant, tokenizer, assistant_tokenizer, end_tokens(stopping_criteria))
    mask = slim_mask(own, pair)
    length = input_ids.shape[1]
    room = room_of(stopping_criteria, length)
    config = configured(own, pair, assistant, mask, generation_config, room, length - min(padding))
    heads = resolve_heads(own.heads, None) if isinstance(own.heads, str) else own.heads
    returned = bool(generation_config.return_dict_in_generate)
    wanted = Wanted(
        stopping_criteria,
        streamer,
        scores=bool(returned and generation_config.output_scores),
        logits=bool(returned and generation_config.output_logits),
    )
    crowd = Crowd.of(pair, config, mask, len(padding))
    if crowd is not None:
        config = crowd.policy.paced(config)
    rows: list[RowSession] = []
    for row, spare in enumerate(padding):
        ids = input_ids[row : row + 1]
        mine = of_row(logits_processor, row, len(padding), generation_config.num_return_sequences or 1)
        sampler = PreparedSampler(
            mine, greedy=config.sampling.greedy, lead=ids[0, :spare].tolist(), device=input_ids.device
        )
        assert config.seed is not None
        rows.append(
            RowSession(
                pair,
                ids,
                spare,
                replace(config, seed=config.seed + row),
                wanted,
                sampler,
                mask=mask,
                heads=heads,
                guard=rows[0].guard if rows else None,  # learns over all rows
                name=f"row {row}" if len(padding) > 1 else None,
            )
        )
    answers = decoded(rows, crowd)
    if streamer is not None:
        streamer.end()
    results = [answer.result for answer in answers]
    _tell(results, alpha_of(config.decoding), greedy=config.sampling.greedy)
    # Without a padding token all rows are equally long: `check_batch` has seen to that.
    pad = 0 if generation_config._pad_token_tensor is None else int(generation_config._pad_token_tensor)
    sequences = _sequences(answers, pad)
    if not returned:
        return sequences
    output = GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_steps([a.scores for a in answers], pad) if wanted.scores else None,
        logits=_steps([a.logits for a in answers], pad) if wanted.logits else None,
    )
    output.viasd = results
    return output


def _through_transformers(model: Any, call: Any, tokenizer: Any, **request: Any) -> Any:
    """Lets transformers prepare a request and decodes it by `call`."""
    if request.pop("custom_generate", None) not in (None, generate):
        raise OptionError("custom_generate is what viasd.hf.generate stands for; leave it out")
    found = StoppingCriteriaList(request.pop("stopping_criteria") or [])
    configs = (request["generation_config"], model.generation_config)
    given = (request.get("stop_strings"), *(getattr(config, "stop_strings", None) for config in configs))
    strings = next((s for s in given if s is not None), None)
    if strings is not None and tokenizer is not None:
        # transformers takes the tokenizer away from a callable and then misses it, so the criterion is made here.
        request["stop_strings"] = None
        if not any(type(c) is StopStringCriteria for c in found):
            found.append(StopStringCriteria(tokenizer, strings))
    # Of the class: `model.generate` may be this very function, where the model's folder brings it along.
    return type(model).generate(model, stopping_criteria=found, custom_generate=call, **request)


def _tell(results: Sequence[Result], alpha: float, *, greedy: bool) -> None:
    """Warns of an output that is not the model's own, with what was measured over all rows; notes go to the log.

    A confident readout of the full verifier makes another target of it, towards which the output may well be lossless.
    """
    for note in dict.fromkeys(note for result in results for note in result.notes):
        _log.info(note)
    first = results[0]
    if first.lossless and first.readouts.full is None:
        return
    total = Counters()
    for result in results:
        total.merge(result.stats)
    loss = describe_loss(first.mode, total, first.lossless, alpha, greedy=greedy, readout=first.readouts.full)
    warnings.warn(f"viasd.hf.generate: {loss}", LossyWarning, stacklevel=2)


def _sequences(rows: Sequence[Answer], pad: int) -> Tensor:
    """The rows with their answers, ``[B, m]``, padded behind."""
    longest = max(row.ids.shape[1] for row in rows)
    return torch.cat([nn.functional.pad(row.ids, (0, longest - row.ids.shape[1]), value=pad) for row in rows])


def _steps(rows: Sequence[Sequence[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Step by step the rows ``[B, V]`` of all answers; one that has ended is certain of padding."""
    ended = torch.full_like(rows[0][0], -torch.inf)
    ended[pad] = 0.0
    longest = max(len(row) for row in rows)
    return tuple(torch.stack([row[t] if t < len(row) else ended for row in rows]) for t in range(longest))
