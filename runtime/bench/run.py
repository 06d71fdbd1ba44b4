"""One benchmark: every method on every prompt, in turn, timed, checked, and written down as it goes."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from viasd.errors import ViasdError
from viasd.pair import Pair
from viasd.runtime.bench.config import BenchConfig
from viasd.runtime.bench.dataset import Dataset, Item
from viasd.runtime.bench.grid import Grid
from viasd.runtime.bench.methods import Answer, Method
from viasd.runtime.bench.records import Record, ResultFile
from viasd.runtime.check import compare_tokens, mean_log_q
from viasd.runtime.metrics import Counters
from viasd.sampling import SamplingConfig

YARDSTICK = "plain"
Tell = Callable[[int, int, Item], None]


@dataclass(frozen=True)
class Bench:
    """A benchmark that is ready to run.

    Attributes:
        pair: The pair.
        config: What to measure.
        grid: The methods.
        dataset: The prompts.
        chat: Whether prompts go through the chat template.
    """

    pair: Pair
    config: BenchConfig
    grid: Grid
    dataset: Dataset
    chat: bool

    def settings(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that decides the records; a result file is only continued where all of it is the same."""
        config = self.config
        return {
            "pair": self.pair.name,
            "target": self.pair.target_id,
            **environment,
            "dataset": [self.dataset.name, self.dataset.sha256[:16]],
            "prompts": hashlib.sha256(repr(self.dataset.items).encode()).hexdigest()[:16],
            "chat": self.chat,
            "max_new_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "seed": config.seed,
            "repeats": config.repeats,
            "warmup": config.warmup,
            "ignore_eos": config.ignore_eos,
            "check": config.check,
            "methods": [method.spec.as_json() for method in self.grid.methods.values()],
        }

    def run(self, results: ResultFile, tell: Tell = lambda done, of, item: None) -> None:
        """Measures every prompt that the result file does not have yet.

        Raises:
            KeyboardInterrupt: At Ctrl-C; the prompts measured before it are kept.
        """
        items = self.dataset.items
        left = [(i, item) for i, item in enumerate(items) if not results.has(item)]
        warm = False
        for i, item in left:
            tell(i, len(items), item)
            try:
                ids = self.pair.encode([{"role": "user", "content": item.text}] if self.chat else item.text)
            except ViasdError as error:  # too long, or refused by the chat template
                results.add([{**_head(m, item), "error": _one_line(error)} for m in self.grid.methods.values()])
                continue
            if not warm:
                self._warm_up(ids)
                warm = True
            results.add(self._measure(i, item, ids))

    def _warm_up(self, ids: Sequence[int]) -> None:
        for _ in range(self.config.warmup):
            for method in self.grid.methods.values():
                _tried(method, ids)

    def _measure(self, index: int, item: Item, ids: Sequence[int]) -> list[Record]:
        """All methods on one prompt, `repeats` times in turn; where the turn begins rotates."""
        methods = list(self.grid.methods.values())
        answers: dict[str, list[Answer]] = {m.spec.name: [] for m in methods}
        errors: dict[str, str] = {}
        for repeat in range(self.config.repeats):
            first = (index + repeat) % len(methods)
            for method in (*methods[first:], *methods[:first]):
                name = method.spec.name
                if name in errors:
                    continue
                outcome = _tried(method, ids, first=repeat == 0)
                if isinstance(outcome, Answer):
                    answers[name].append(outcome)
                else:
                    errors[name] = outcome
        records = []
        plain = None if YARDSTICK in errors else answers[YARDSTICK][0].tokens
        for method in methods:
            method.settle()
            name = method.spec.name
            record = _head(method, item) | {"prompt_tokens": len(ids)}
            if name in errors:
                record["error"] = errors[name]
            else:
                record |= _figures(answers[name])
                record["lossless"] = method.spec.lossless
                record |= self._judged(method, ids, answers[name][0].tokens, plain)
            records.append(record)
        return records

    def _judged(
        self, method: Method, ids: Sequence[int], tokens: Sequence[int], plain: Sequence[int] | None
    ) -> dict[str, Any]:
        """What can be said of an answer beside plain decoding's: equality (lossless), or distance from q (lossy)."""
        sampling = SamplingConfig(temperature=self.config.temperature)
        if not method.spec.lossless:
            distance: dict[str, Any] = {"mean_log_q": mean_log_q(self.pair, ids, tokens, sampling)}
            if sampling.greedy:
                found = compare_tokens(self.pair, ids, tokens, sampling, lossless=False)
                distance |= {"compared": found.compared, "disagreed": found.disagreed}
                if plain is not None:
                    same = sum(a == b for a, b in zip(tokens, plain, strict=False))
                    distance |= {"plain": len(plain), "as_plain": same}
            return {"lossy": distance}
        if not self.config.check or plain is None or method.spec.name == YARDSTICK:
            return {}
        return {"check": mismatch(self.pair, ids, tokens, plain)}


def mismatch(pair: Pair, ids: Sequence[int], tokens: Sequence[int], plain: Sequence[int]) -> dict[str, Any]:
    """Whether an answer is plain greedy decoding's, and if not, whether the first difference is a near-tie or a bug."""
    if list(tokens) == list(plain):
        return {"equal": True, "compared": len(plain)}
    common = next((i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b), None)
    if common is None:  # one goes on where the other has ended: no rounding explains that
        return {"equal": False, "compared": len(plain), "index": min(len(tokens), len(plain)), "kind": "bug"}
    found = compare_tokens(pair, ids, tokens[: common + 1], SamplingConfig(), lossless=True)
    # Where q now says what the answer says, plain decoding itself did not round the same way twice.
    kind = "near-tie" if found.equal or found.near_tie else "bug"
    return {
        "equal": False,
        "compared": len(plain),
        "index": common,
        "token": tokens[common],
        "plain": plain[common],
        "gap": found.gap,
        "kind": kind,
    }


def _tried(method: Method, ids: Sequence[int], *, first: bool = False) -> Answer | str:
    """An answer, or what went wrong: one method's failure on one prompt must not end the others' measurement.

    Args:
        method: The method.
        ids: The prompt.
        first: Whether the method sees it for the first time.
    """
    try:
        if first:
            method.prepare(ids)
        return method.answer(ids)
    except Exception as error:
        return _one_line(error)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


def _head(method: Method, item: Item) -> Record:
    return {"method": method.spec.name, "kind": method.spec.kind, "task": item.task, "prompt": item.id}


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """One method's repeats on one prompt as numbers."""
    seconds = [a.seconds for a in answers]
    median = statistics.median(seconds)
    typical = min(answers, key=lambda a: abs(a.seconds - median))
    figures: dict[str, Any] = {
        "tokens": len(typical.tokens),
        "seconds": median,
        "seconds_all": seconds,
        "finish_reason": typical.finish_reason,
        "target_calls": typical.target_calls,
        "output": {
            "sha256": hashlib.sha256(" ".join(map(str, typical.tokens)).encode()).hexdigest(),
            "characters": len(typical.text),
            "same_every_time": all(a.tokens == typical.tokens for a in answers),
        },
    }
    if typical.counters is not None:
        figures["counts"] = _counts(typical.counters)
        figures["time"] = _split(typical.counters, typical.seconds)
    return figures


def _counts(counters: Counters) -> dict[str, Any]:
    """The counts of a generation; seconds and ratios are kept elsewhere."""
    counts = counters.as_json()
    for name in ("seconds", "tokens_per_second", "seconds_by_tier"):
        del counts[name]
    return counts


def _split(counters: Counters, seconds: float) -> dict[str, float]:
    """Seconds by what they went into; what is none of the passes is the loop's (making the request included)."""
    parts = {name: counters.seconds_by_tier[tier] for name, tier in _PARTS.items()}
    return {**parts, "loop": max(0.0, seconds - sum(parts.values()))}


_PARTS = {"draft": "drafter", "slim": "slim", "full": "full", "prefill": "prefill"}
