"""The rows of a batch share their passes, and each is answered as it would be alone."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engines import same, watched
from inside import inputs, state
from tiny import model_of

import viasd
from viasd.errors import LoadError
from viasd.kernels.build import why_missing
from viasd.layered import LayeredModel
from viasd.runtime import assembly
from viasd.runtime.adaptive.costs import BatchCosts
from viasd.runtime.costs import CostTable
from viasd.runtime.engine import adaptive as policy
from viasd.runtime.engine import batch, memory
from viasd.runtime.guard import GuardedGate
from viasd.runtime.hf import decode, together
from viasd.runtime.hf.driven import kept
from viasd.testing import perturbed, tiny_model

N = 24
STEEP = BatchCosts(8, 64, {n: 0.001 * n for n in range(1, 99)}, {n: 0.001 * n for n in range(1, 99)}, {})
TEXTS = ("hello hello world, hello", "hi there, hi", "a", "one two, one two, one", "no", "world, hello", "hi hi hi hi")
LONG = ("hello hello world, hello. " * 14, "hi there, hi", "no no " * 50)  # one of more than a piece
FIXED: dict[str, Any] = {"viasd_options": {"draft_length": "fixed"}}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {"viasd_strategy": "plain"},
    "lookup": FIXED,
    "paced": {},
    "model": {"assistant_model": "perturbed", "viasd_gamma": 3, **FIXED},
    "mask": {"viasd_mask": "even:0.25", "assistant_model": "self"},
    "bounded": {"viasd_mask": "even:0.25", "viasd_mode": "bounded", "assistant_model": "perturbed"},
}


def call(model: Any, texts: Sequence[str], how: str, **options: Any) -> Any:
    own = {**HOWS[how], "max_new_tokens": N, "return_dict_in_generate": True, **options}
    if own.get("assistant_model") == "perturbed":
        own["assistant_model"] = perturbed(model, 0.3)
    torch.manual_seed(3)
    return viasd.hf.generate(model, **inputs(texts), **own)


@pytest.fixture
def by_row(monkeypatch: Any) -> Any:
    """Lets rows be decoded one after the other."""

    def use() -> None:
        monkeypatch.setattr(decode, "decoded", lambda rows, _: [row.run() for row in rows])

    return use


@pytest.mark.filterwarnings("ignore::viasd.hf.LossyWarning")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("how", sorted(HOWS))
def test_every_row_is_what_it_is_alone(how: str, sampled: bool, monkeypatch: Any, by_row: Any) -> None:
    model = tiny_model("gemma2")
    model.generation_config.eos_token_id = [2, *range(40, 60)]  # rows end at different places
    settings = {"do_sample": sampled, "repetition_penalty": 1.1, "output_scores": True, "output_logits": True}
    if sampled:
        settings |= {"num_return_sequences": 2, "temperature": 1.3}
    monkeypatch.setattr(together, "MOST_ROWS", 5)  # the others wait for a place
    if how != "bounded":  # which is left in peace
        monkeypatch.setattr(together, "_CROWD", 2 if how == "paced" else 99)
    monkeypatch.setattr(policy, "batch_costs", lambda *_: STEEP)
    shared = call(model, TEXTS, how, **settings)
    by_row()
    alone = call(model, TEXTS, how, **settings)
    assert torch.equal(shared.sequences, alone.sequences)
    assert len({len(result.token_ids) for result in shared.viasd}) > 2
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(shared, name), getattr(alone, name), strict=True):
            # Under the CPU kernels bit for bit.
            close = {} if why_missing() else {"atol": 0.0, "rtol": 0.0}
            torch.testing.assert_close(ours, theirs, **close)
    pairs = list(zip(shared.viasd, alone.viasd, strict=True))
    # Lengths by measured times; and somebody counted.
    assert how in ("paced", "bounded") or all(same(ours, theirs) for ours, theirs in pairs)
    assert [r.seed for r in shared.viasd] == [r.seed for r in alone.viasd]


@pytest.mark.parametrize(
    ("rows", "options", "trimmed"),
    [(7, {}, True), (3, {}, False), (7, {"do_sample": True}, False), (7, FIXED, False)],
)
def test_drafts_of_many_rows_are_trimmed(rows: int, options: dict[str, Any], trimmed: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(policy, "batch_costs", lambda *_: STEEP)
    model = tiny_model("llama")
    learnt: list[int] = []
    for _ in range(2):
        out = call(model, TEXTS[:rows], "paced", **options)
        if not options:
            assert torch.equal(out.sequences, call(model, TEXTS[:rows], "plain").sequences)
        counts = [result.stats.adaptive for result in out.viasd]
        assert any(c.admitted < c.offered for c in counts) == trimmed
        rooms = [kinds["lookup"] for kinds in kept(model).measured.values()]
        states = [state for room in rooms for key, state in room.items() if key[0] == "adaptive verification"]
        learnt += [state["edges"][0]["estimator"]["observations"] for state in states]
    assert len(learnt) == 2 * trimmed
    assert learnt == sorted(set(learnt))  # the second request goes on where the first ended


@pytest.mark.parametrize(("batch", "drafts"), [(0.001, True), (1.0, False)])
def test_costs_of_the_batch_say_how_long_drafts_are(batch: float, drafts: bool, monkeypatch: Any) -> None:
    # Alone it would be the other way round.
    table = BatchCosts(8, 64, {n: 1 + batch * n for n in range(1, 99)}, {}, {1: 0.01, 8: 0.02})
    monkeypatch.setattr(policy, "batch_costs", lambda *_: table)
    alone = CostTable(128, {n: 1 + n / batch / 1000 for n in range(1, 40)}, {}, {}, 0.01)
    monkeypatch.setattr(assembly, "cost_table", lambda *_, **__: alone)
    out = call(tiny_model("llama"), TEXTS[:6], "paced", assistant_model="perturbed", max_new_tokens=60)
    drafted = sum(result.stats.drafted for result in out.viasd)
    rounds = sum(result.stats.rounds for result in out.viasd)
    assert drafted > rounds if drafts else drafted < rounds / 2


def test_passes_are_shared_and_a_row_leaves_when_it_has_ended(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    texts = [text for text in TEXTS if len(text) > 1]  # a single token has no prompt to be run before the first step
    written = call(model, texts, "plain", eos_token_id=None).sequences[:, -N:].tolist()
    end = written[1][5]
    ends = [row.index(end) + 1 if end in row else N for row in written]
    assert len(set(ends)) > 1
    held: list[Any] = []
    passes: list[tuple[int, int]] = []
    new_kv, run_full = LayeredModel.new_kv, batch.run_full

    def remembering(model: LayeredModel) -> Any:
        kv = new_kv(model)
        held.append(weakref.ref(kv))
        return kv

    def counting(wanted: Any) -> Any:
        caches = sum(kv() is not None and kv().nbytes() > 0 for kv in held)
        passes.append((sum(w.rows for w in wanted), caches))
        return run_full(wanted)

    monkeypatch.setattr(LayeredModel, "new_kv", remembering)
    monkeypatch.setattr(batch, "run_full", counting)
    out = call(model, texts, "plain", eos_token_id=end)
    assert [len(result.token_ids) for result in out.viasd] == ends
    last = [row[n - 1] for row, n in zip(written, ends, strict=True)]
    assert [result.finish_reason for result in out.viasd] == ["eos" if t == end else "length" for t in last]
    running = [sum(n >= t for n in ends) for t in range(1, max(ends) + 1)]
    assert [n for n, _ in passes if n] == running, "one pass a token, with the rows that go on"
    assert [caches for n, caches in passes if n] == running, "a row that has ended has given its memory back"


@pytest.mark.parametrize("how", ["lookup", "mask"])
def test_long_prompts_come_in_pieces(how: str, by_row: Any, monkeypatch: Any) -> None:
    model = model_of("llama", max_position_embeddings=1024)
    with watched(monkeypatch) as seen:
        shared = call(model, LONG, how)
    assert max(tokens for _, tokens in seen.full) > 256, "pieces of several prompts travel together"
    theirs = model.generate(**inputs(LONG), max_new_tokens=N)
    assert torch.equal(shared.sequences, theirs)


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_little_memory_delays_rows_and_refuses_none(fitting: int, monkeypatch: Any, caplog: Any) -> None:
    model = model_of("llama")
    theirs = model.generate(**inputs(TEXTS), max_new_tokens=N)
    needed: list[int] = []
    caplog.set_level("INFO", logger="viasd.runtime.hf.together")
    monkeypatch.setattr(together, "worst_bytes", lambda row: needed.append(memory.worst_bytes(row)) or needed[-1])
    call(model, TEXTS, "plain")
    assert len(set(needed)) == 1
    assert not caplog.records
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * fitting * needed[0])  # of which half may be used
    with watched(monkeypatch) as seen:
        ours = call(model, TEXTS, "plain")
    assert torch.equal(ours.sequences, theirs)
    assert max(n for n, _ in seen.full) == max(1, fitting)
    assert "some wait for others to end" in caplog.text


class Mine(Exception):
    """The caller's own."""


@pytest.mark.parametrize("kind", [Mine, KeyboardInterrupt])
@pytest.mark.parametrize("how", ["lookup", "mask"])
def test_what_the_callers_code_raises_leaves_generate_as_it_is(how: str, kind: type[BaseException]) -> None:
    model = tiny_model("llama")
    before = state(model)
    raised = kind("no more")

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        if row == 1 and len(ids) > 30:
            raise raised
        return list(range(300))

    with pytest.raises(kind) as found:
        call(model, TEXTS, how, prefix_allowed_tokens_fn=allowed)
    assert found.value is raised
    assert any(entry.name == "allowed" for entry in found.traceback), "the traceback shows where"
    assert state(model) == before
    assert torch.equal(call(model, TEXTS, how).sequences, model.generate(**inputs(TEXTS), max_new_tokens=N))


def test_memory_that_does_not_suffice(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    call(model, TEXTS, "plain", max_new_tokens=1)

    def full(wanted: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(batch, "run_full", full)
    with pytest.raises(LoadError, match="out of memory on cpu; use fewer rows"):
        call(model, TEXTS, "plain")


def test_waves_of_their_own_are_not_shared(monkeypatch: Any) -> None:
    monkeypatch.setattr(together, "Engine", None)
    out = call(model_of("llama"), TEXTS, "plain", viasd_strategy="adadecode", viasd_heads="lens:3,5")
    assert torch.equal(out.sequences, model_of("llama").generate(**inputs(TEXTS), max_new_tokens=N))


@pytest.mark.filterwarnings("ignore::viasd.hf.LossyWarning")
@pytest.mark.parametrize("sampled", [False, True])
def test_a_guard_learns_over_all_rows_and_only_between_their_rounds(sampled: bool, monkeypatch: Any) -> None:
    """It has to see 96 tokens judged, which a single row of these does not have."""
    step, learn = together.Engine.step, GuardedGate.learn
    known: list[int] = []
    heard: list[int] = []

    def learning(gate: GuardedGate, *args: Any) -> None:
        learn(gate, *args)
        known.append(gate.guard.estimator.observations)

    def stepping(engine: Any) -> Any:
        known.clear()
        events = step(engine)
        assert len(set(known)) <= 1
        heard.append(len(known))
        return events

    monkeypatch.setattr(GuardedGate, "learn", learning)
    monkeypatch.setattr(together.Engine, "step", stepping)
    own = {
        **{"viasd_mask": "even:0.125", "viasd_mode": "via", "max_new_tokens": 50, "do_sample": sampled, "top_k": 2},
        **{"assistant_model": "self", "viasd_options": {"max_disagreement": 0.6, "audit": 0.0, "self_skip": 0.1}},
    }
    model = model_of("llama")
    shared = call(model, TEXTS * 2, "lookup", **own)
    assert sum(r.stats.unseen for r in shared.viasd) > 0
    assert all(r.stats.check() == [] for r in shared.viasd)
    assert max(heard) > 1
    alone = call(model, TEXTS[:1], "lookup", **own)
    assert alone.viasd[0].stats.unseen == 0
