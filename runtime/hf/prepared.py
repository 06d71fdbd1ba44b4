"""The logits processors that transformers has prepared, as the `Sampler` of one row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process

from viasd.sampling import Ahead, Processor, Sampler, SamplingConfig


def _kinds(*names: str) -> tuple[type, ...]:
    return tuple(getattr(logits_process, name) for name in names)


# They look at nothing but the row itself, so many rows can go through them at once.
_WARPERS = _kinds(
    *("TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper"),
    *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization"),
)
# They give the same for the same ids and row however often they were called, so they need no copies. (The watermark seeds
# its generator anew for every row.)
_STATELESS = _WARPERS + _kinds(
    *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
    *("EncoderRepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor"),
    *("SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "ForcedBOSTokenLogitsProcessor"),
    *("ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty"),
    *("SuppressTokensAtBeginLogitsProcessor", "SuppressTokensLogitsProcessor", "WatermarkLogitsProcessor"),
)


class PreparedSampler(Sampler):
    """Laws of one row as transformers would draw from them.

    Args:
        processors: What `generate` has prepared, for this row (`of_row`).
        greedy: Whether the most probable token is taken.
        lead: The row's padding: processors are shown ids as transformers shows them, padding included.
        device: Where ids and rows are when the processors see them.
    """

    def __init__(self, processors: Sequence[Any], *, greedy: bool, lead: Sequence[int], device: torch.device) -> None:
        placed = [_OnDevice(p, device) for p in processors]
        # Where the argmax is taken nothing is gained by splitting, and a warper may even ban it (typical_p).
        tail = 0 if greedy else _trailing(processors, _WARPERS)
        chain, warpers = placed[: len(placed) - tail], placed[len(placed) - tail :]
        fixed = next((i for i, p in enumerate(processors) if type(p) not in _STATELESS), len(processors))
        super().__init__(SamplingConfig(temperature=0.0 if greedy else 1.0), chain[fixed:])
        self._stateless: list[Processor] = list(chain[:fixed])
        self._warpers = LogitsProcessorList(warpers)
        self._lead = list(lead)

    def ahead(self, prefix: Sequence[int]) -> Ahead:
        """See `Sampler.ahead`."""
        return super().ahead([*self._lead, *prefix])

    @property
    def keeps_state(self) -> bool:
        """Whether a processor has to be shown every committed token."""
        return bool(self._user)

    def shown(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Scores ``[1, V]`` as transformers returns them, of a committed token; the caller's processors see its row once.

        Args:
            ids: Everything before the token, padding included, ``[1, n]``.
            logits: Its raw row ``[1, V]``.
        """
        row = logits.clone()
        for processor in (*self._stateless, *self._user, *self._warpers):
            row = processor(ids, row)
        return row

    def commit(self, prefix: Sequence[int], tokens: Sequence[int], logits: Tensor | None) -> None:
        """Does nothing: `shown` has been called for each of these tokens already."""


def of_row(processors: Sequence[Any], row: int, rows: int, per_prompt: int) -> list[Any]:
    """The prepared processors as they are for one row of a batch.

    Args:
        processors: For the whole batch.
        row: Index of the row.
        rows: Rows of the batch.
        per_prompt: Rows that belong to one prompt.

    Returns:
        For a single row the very objects; for one of several, copies of what keeps a state or knows its rows.
    """
    return list(processors) if rows == 1 else [_of_row(p, row, per_prompt) for p in processors]


def _of_row(processor: Any, row: int, per_prompt: int) -> Any:
    if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(row // per_prompt, ids), 1)
    ignored = getattr(processor, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        twin = copy.copy(processor)
        twin.prompt_ignore_length = ignored[row : row + 1]
        return twin
    return processor if type(processor) in _STATELESS else copy.deepcopy(processor)


def _trailing(processors: Sequence[Any], kinds: tuple[type, ...]) -> int:
    """How many processors at the end of the list are of these kinds."""
    return next((n for n, p in enumerate(reversed(processors)) if type(p) not in kinds), len(processors))


class _OnDevice:
    """A processor that is shown ids and rows where it was made for, and gives its rows back where they came from."""

    def __init__(self, processor: Any, device: torch.device) -> None:
        self._processor = processor
        self._device = device
        self.__name__ = getattr(processor, "__name__", type(processor).__name__)

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        if logits.device == self._device:
            rows: Tensor = self._processor(ids, logits)
            return rows
        rows = self._processor(ids.to(self._device), logits.to(self._device))
        return rows.to(logits.device)
