"""The figures of a confident readout, against transformers' own states and by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import model_of, pair_of

from viasd.confident import ConfidentConfig, select
from viasd.pair import Pair
from viasd.runtime.bench import confident
from viasd.runtime.bench.confident import Tally, Worked, likelihood

WORKED = [
    Worked(tuple(range(10, 18)), tuple(range(60, 100))),
    Worked((20, 21, 22), (90, 91, 92, 93, 94)),
    Worked((30,) * 5, (80, 99, 81)),
]
ANY = ConfidentConfig(max_backtrack_layers=-1)


def rows(pair: Pair, item: Worked) -> torch.Tensor:
    """Log-probabilities ``[layers, n, V]`` behind every layer where an answer's tokens are predicted, by transformers."""
    hf: Any = pair.target.model
    found: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in hf.model.layers
    ]
    with torch.no_grad():
        hf(input_ids=torch.tensor([[*item.prompt, *item.answer[:-1]]]), use_cache=False)
        logits = torch.stack([hf.lm_head(hf.model.norm(h))[0, len(item.prompt) - 1 :] for h in found])
    for hook in hooks:
        hook.remove()
    return torch.log_softmax(logits.double(), -1)


def test_figures_are_those_of_transformers_own_states() -> None:
    pair = pair_of("llama")
    found = likelihood(pair, WORKED, {"trough": ANY, "last-m2": ConfidentConfig("last-m2")})
    assert (found["answers"], found["too_long"], found["layers"]) == (3, 0, 8)
    for name, figures in found["readouts"].items():
        moved = depth = changed = right = right_last = 0
        answers = []
        for item in WORKED:
            logp = rows(pair, item)
            entropies = -(logp.exp() * logp).sum(-1)
            chosen = last = 0.0
            for i, token in enumerate(item.answer):
                layer = 5 if name == "last-m2" else select(entropies[:, i].tolist(), -1)
                moved, depth = moved + (layer != 7), depth + 7 - layer
                best, best_last = int(logp[layer, i].argmax()), int(logp[7, i].argmax())
                changed, right, right_last = (
                    changed + (best != best_last),
                    right + (best == token),
                    right_last + (best_last == token),
                )
                chosen, last = chosen + float(logp[layer, i, token]), last + float(logp[7, i, token])
            answers.append((len(item.answer), chosen, last))
        n = sum(a[0] for a in answers)
        assert figures["tokens"] == n == 48
        assert figures["moved"] == pytest.approx(moved / n)
        assert figures["mean_depth"] == pytest.approx(depth / n)
        assert figures["best_token_changed"] == pytest.approx(changed / n)
        assert figures["reference_is_best"] == pytest.approx(right / n)
        assert figures["reference_is_best_last_layer"] == pytest.approx(right_last / n)
        assert figures["log_likelihood"] == pytest.approx(sum(a[1] for a in answers) / n, abs=1e-4)
        assert figures["log_likelihood_last_layer"] == pytest.approx(sum(a[2] for a in answers) / n, abs=1e-4)
        assert figures["gain"] == pytest.approx(figures["log_likelihood"] - figures["log_likelihood_last_layer"])
        assert figures["gain_of_moved"] * moved == pytest.approx(figures["gain"] * n, abs=1e-3)
        assert figures["rows_read_per_row"] == (1 if name == "last-m2" else pytest.approx(figures["rows_read_per_row"]))
        assert moved
        assert changed


def test_a_readout_that_moves_nothing_gains_nothing() -> None:
    found = likelihood(pair_of("llama"), WORKED, {"off": ConfidentConfig(max_backtrack_layers=0)})["readouts"]["off"]
    assert (found["moved"], found["gain"], found["best_token_changed"], found["gain_of_moved"]) == (0, 0, 0, None)
    assert found["rows_read_per_row"] == 1


def test_the_error_of_a_gain_counts_answers_not_tokens() -> None:
    gains = [0.5, -0.25, 1.0]
    figures = Tally(answers=[(10, 10 * g, 0.0) for g in gains]).as_json()
    mean = sum(gains) / 3
    assert figures["gain"] == pytest.approx(mean)
    assert figures["gain_error"] == pytest.approx(math.sqrt(sum((g - mean) ** 2 for g in gains)) / 3)
    assert Tally(answers=[(10, 1.0, 0.0)]).as_json()["gain_error"] is None


def test_what_is_longer_than_the_context_is_left_out_and_counted() -> None:
    pair = pair_of("llama", max_position_embeddings=32)
    found = likelihood(pair, WORKED, {"trough": ANY})
    assert (found["answers"], found["too_long"]) == (2, 1)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(confident, "load_pair", lambda name, **_: calls.append(name) or pair_of("llama"))
    return calls


def test_the_command_prints_one_object_a_section(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gsm.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i} + {i}?", "answer": f"It is {2 * i}."}) + "\n" for i in range(5))
    )
    argv = [
        "--dataset",
        str(path),
        "--limit",
        "3",
        "--readout",
        "trough",
        "--readout",
        "last-m1",
        "--backtrack-layers",
        "2",
    ]
    assert confident.main([*argv, "--repeats", "1", "--tokens", "4"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["section"], first["answers"]) == ("likelihood", 3)
    assert set(first["readouts"]) == {"trough", "last-m1"}
    assert first["readouts"]["trough"]["is"] == "confident readout (trough, up to 2 layers back)"
    assert first["readouts"]["last-m1"]["moved"] == 1
    assert second["section"] == "overhead"
    assert set(second["tokens_per_second"]) == {"last layer", "trough", "last-m1"}
    assert all(ratio > 0 for ratio in second["times_slower"].values())
    assert confident.main(["--section", "overhead", "--repeats", "1", "--tokens", "2"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "argv", "words"),
    [
        ("", [], "has no questions"),
        ("{}\n", [], "line 1: expected an object with 'question' and 'answer'"),
        ('{"question": "a", "answer": "b"}\n[1]\n', [], "line 2"),
        ('{"question": "a", "answer": ""}\n', [], "must hold some text"),
        (None, [], "can't read data set"),
        ('{"question": "a", "answer": "b"}\n', ["--readout", "last-m8"], "last-m8 is 8 layers before the last"),
        ('{"question": "a", "answer": "b"}\n', ["--backtrack-ratio", "2"], "backtrack_ratio must be between"),
    ],
)
def test_what_can_not_be_done_is_one_line(
    asked: list[Any], text: str | None, argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gsm.jsonl"
    if text is not None:
        path.write_text(text)
    assert confident.main(["--dataset", str(path), "--section", "likelihood", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_likelihood_needs_a_data_set(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert confident.main(["--section", "likelihood"]) == 2
    assert "needs --dataset FILE" in capsys.readouterr().err
    assert asked == []


def test_a_softcap_is_part_of_the_rows() -> None:
    pair = pair_of("gemma2", final_logit_softcapping=3.0)
    found = likelihood(pair, WORKED[:1], {"trough": ANY})["readouts"]["trough"]
    hf: Any = model_of("gemma2", final_logit_softcapping=3.0)
    item = WORKED[0]
    with torch.no_grad():
        logits = hf(input_ids=torch.tensor([[*item.prompt, *item.answer[:-1]]]), use_cache=False).logits[0]
    own = torch.log_softmax(logits[len(item.prompt) - 1 :], -1)
    wanted = torch.tensor(item.answer)
    assert found["log_likelihood_last_layer"] == pytest.approx(float(own.gather(1, wanted[:, None]).mean()), abs=1e-4)
