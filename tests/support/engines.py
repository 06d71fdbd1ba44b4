"""Requests of many kinds, and an engine that watches how its passes are put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

import viasd
from viasd.runtime.engine import EngineEvent


@dataclass
class Seen:
    """The passes of an engine: for each kind, how many sequences and how many tokens of prompts travelled together."""

    full: list[tuple[int, int]] = field(default_factory=list)
    slim: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    features: list[int] = field(default_factory=list)


@contextmanager
def watched(monkeypatch: Any) -> Iterator[Seen]:
    """Watches the packed passes of every engine."""
    import viasd.runtime.engine.batch as batch

    seen, full, slim, draft, features = Seen(), batch.run_full, batch.run_slim, batch.run_drafts, batch.run_features

    def run_full(wanted: Any) -> Any:
        prompts = sum(len(w.tokens) - w.target.kv.full_len for w in wanted if not w.rows)
        seen.full.append((sum(w.rows > 0 for w in wanted), prompts))
        return full(wanted)

    def run_slim(wanted: Any) -> Any:
        seen.slim.append(len(wanted))
        return slim(wanted)

    def run_drafts(wanted: Any) -> Any:
        seen.draft.append(len(wanted))
        return draft(wanted)

    def run_features(wanted: Any) -> Any:
        seen.features.append(len(wanted))
        return features(wanted)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "run_full", run_full)
        patch.setattr(batch, "run_slim", run_slim)
        patch.setattr(batch, "run_drafts", run_drafts)
        patch.setattr(batch, "run_features", run_features)
        yield seen


def alone(pair: viasd.Pair, request: dict[str, Any], mask: str | None) -> viasd.Result:
    """A request's answer without an engine; only a strategy that has use for the mask is given it."""
    options = {k: v for k, v in request.items() if k != "prompt"}
    masked = options.get("strategy") in ("cascade", "self-sd", "slim")
    return viasd.generate(pair, request["prompt"], mask=mask if masked else None, **options)


def same(result: viasd.Result, expected: viasd.Result) -> bool:
    """Whether two answers are the same in everything but their times, and in what rounding does to a measured distance."""
    assert result.stats.check() == []
    got, want = result.as_json(), expected.as_json()
    distances = []
    for answer in (got, want):
        for timed in ("seconds", "seconds_by_tier", "tokens_per_second"):
            answer["stats"].pop(timed)
        distances.append(answer["stats"]["audit"].pop("disagreed"))
        distances += answer["stats"]["audit"].pop("interval")
        answer["notes"] = [note for note in answer["notes"] if not note.startswith("LOSSY")]
    return got == want and distances[:3] == pytest.approx(distances[3:], abs=1e-3)


def told(events: list[EngineEvent]) -> dict[int, tuple[str, list[int]]]:
    """What the events of each request come to."""
    texts: dict[int, tuple[str, list[int]]] = {}
    for event in events:
        text, ids = texts.get(event.request, ("", []))
        texts[event.request] = text + event.text, [*ids, *event.token_ids]
    return texts
