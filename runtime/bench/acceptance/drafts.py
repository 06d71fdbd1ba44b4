"""Labelled drafts: what became of every drafted token that a verifier judged, kept in a file that grows prompt by prompt."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from viasd.accept import overlaps
from viasd.draws import SeededDraws
from viasd.errors import OptionError
from viasd.estimator import Array
from viasd.files import write_atomically
from viasd.mask import LayerMask
from viasd.pair import Pair
from viasd.runtime.assembly import Assembly
from viasd.runtime.bench.acceptance.features import MEASURED, measure_rows
from viasd.runtime.config import DecodingConfig, Plan
from viasd.runtime.judge import judge_block
from viasd.runtime.metrics import Counters
from viasd.runtime.strategies import Workbench
from viasd.runtime.target import TieredTarget
from viasd.sampling import Sampler, SamplingConfig

#: Besides `MEASURED`: place in the block, kept (0 or 1), sum of min(p, q), and which prompt and round it was.
COLUMNS = ("position", *MEASURED, "kept", "overlap", "prompt", "round")
Columns = dict[str, Array]


@dataclass(frozen=True)
class Request:
    """One answer to draft for.

    Attributes:
        number: Place in the run.
        ids: The prompt.
        temperature: Its temperature.
        seed: Its seed.
    """

    number: int
    ids: Sequence[int]
    temperature: float
    seed: int


def labelled_drafts(
    pair: Pair,
    request: Request,
    *,
    gamma: int,
    max_new_tokens: int,
    mask: LayerMask | None = None,
    ignore_eos: bool = False,
) -> Columns:
    """Decodes one answer with two tiers, blocks of `gamma` tokens, and says what became of every judged token.

    Judged are the tokens that were kept and the first that was refused; of those behind it nothing is known.

    Args:
        pair: The pair.
        request: What to answer.
        gamma: Length of every block.
        max_new_tokens: Limit of the answer.
        mask: Draft with these layers of the target; None takes the pair's own drafter, which must have rows.
        ignore_eos: Go on past the end of the answer.

    Returns:
        Name -> ``[n]`` for every name of `COLUMNS`.
    """
    sampler = Sampler(SamplingConfig(temperature=request.temperature))
    counters, draws = Counters(), SeededDraws(request.seed)
    target = TieredTarget(pair.target, None, counters)
    bench = Workbench(target, sampler, draws, counters)
    stops = frozenset() if ignore_eos else pair.eos_ids
    strategy = "sd" if mask is None else "self-sd"
    config, plan = DecodingConfig(strategy=strategy, gamma=gamma), Plan(strategy, "lossless")
    assembly = Assembly(pair, config, plan, mask, target, stops, len(request.ids), note=lambda _: None)
    drafter = assembly.drafter(bench)
    assert drafter is not None
    tokens = list(request.ids)
    left = min(max_new_tokens, pair.target.context_length - len(tokens))
    parts: list[Columns] = []
    with torch.inference_mode():
        target.prefill(tokens[:-1])
        drafter.settle(tokens)
        for turn in range(left):
            draft = drafter.propose(tokens, min(gamma, left - 1), sampler.ahead(tokens), draws)
            n = len(draft.tokens)
            logits = target.full([*tokens, *draft.tokens], n + 1)
            verdict, q = judge_block(logits, draft.tokens, draft.rows, sampler, sampler.ahead(tokens), draws)
            judged = min(verdict.accepted + 1, n)
            if judged:
                place = np.arange(judged, dtype=np.float64)
                parts.append(
                    {
                        "position": place,
                        **measure_rows(
                            torch.stack(list(draft.logits[:judged])), draft.tokens[:judged], request.temperature
                        ),
                        "kept": (place < verdict.accepted).astype(float),
                        "overlap": np.array(overlaps(draft.rows, q, judged)),
                        "prompt": np.full(judged, request.number),
                        "round": np.full(judged, turn),
                    }
                )
            emitted = [*draft.tokens[: verdict.accepted], verdict.token][:left]
            tokens += emitted
            left -= len(emitted)
            target.settle(tokens)
            drafter.settle(tokens)
            if left < 1 or stops.intersection(emitted):
                break
    return _joined(parts)


def _joined(parts: Sequence[Mapping[str, Array]]) -> Columns:
    return {c: np.concatenate([np.zeros(0), *(part[c] for part in parts)]) for c in COLUMNS}


class DraftFile:
    """Labelled drafts on disk: one file, whole at every moment, continued by a run of the same settings.

    Args:
        path: An ``.npz`` file.
        settings: What decides the drafts; a file of other settings is not continued.

    Raises:
        OptionError: If the file holds something else.
    """

    def __init__(self, path: str, settings: Mapping[str, Any]) -> None:
        self._path = Path(path)
        self._settings = json.dumps(settings, sort_keys=True)
        self.done = 0
        self.columns = _joined([])
        if self._path.exists():
            self._resume()

    def __len__(self) -> int:
        return len(self.columns["kept"])

    def add(self, columns: Columns) -> None:
        """Takes the drafts of the next request; `save` writes them."""
        self.columns = _joined([self.columns, columns])
        self.done += 1

    def save(self) -> None:
        """Writes everything so far.

        Raises:
            OptionError: If that fails; the old file is untouched.
        """
        buffer = io.BytesIO()
        numbers: dict[str, Any] = {name: values.astype(np.float32) for name, values in self.columns.items()}
        np.savez_compressed(buffer, settings=np.array(self._settings), done=np.array(self.done), **numbers)
        write_atomically(self._path, buffer.getvalue(), OptionError)

    def _resume(self) -> None:
        try:
            with np.load(self._path, allow_pickle=False) as found:
                settings, self.done = str(found["settings"]), int(found["done"])
                self.columns = {name: found[name].astype(np.float64) for name in COLUMNS}
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise OptionError(
                f"'{self._path}' is no file of labelled drafts ({error}); choose another --output"
            ) from error
        if settings != self._settings:
            old, new = json.loads(settings), json.loads(self._settings)
            differing = [f"{k} {old.get(k)}, now {new.get(k)}" for k in {**old, **new} if old.get(k) != new.get(k)]
            raise OptionError(
                f"'{self._path}' holds drafts of other settings ({'; '.join(differing[:3])}); choose another --output"
            )


def requests(prompts: Sequence[Sequence[int]], temperatures: Sequence[float], seed: int) -> Iterator[Request]:
    """Prompts over and over, temperatures taking turns; ends when every further answer would repeat an earlier one."""
    number = 0
    greedy_done: set[int] = set()
    for turn in range(len(temperatures) if max(temperatures) == 0 else 10**6):
        for i, ids in enumerate(prompts):
            temperature = temperatures[(i + turn) % len(temperatures)]
            if temperature == 0 and i in greedy_done:
                continue
            if temperature == 0:
                greedy_done.add(i)
            yield Request(number, ids, temperature, seed + number)
            number += 1
