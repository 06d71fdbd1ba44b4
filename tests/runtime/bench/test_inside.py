from __future__ import annotations

import json
from typing import Any

import pytest
from tiny import pair_of

import viasd
from viasd.runtime.bench import basics, inside


def test_batches_inside_transformers(monkeypatch: Any, capsys: Any) -> None:
    pair = pair_of("llama")
    seen: list[tuple[int, int, str | None]] = []
    generate = type(pair.target.model).generate

    def watching(model: Any, **options: Any) -> Any:
        out = generate(model, **options)
        own = options.get("custom_generate")
        assert own in (None, viasd.hf.generate)
        seen.append((len(out), out.shape[1] - options["input_ids"].shape[1], None if own is None else "ours"))
        return out

    monkeypatch.setattr(type(pair.target.model), "generate", watching)
    monkeypatch.setattr(inside, "ROWS", (1, 3))
    monkeypatch.setattr(basics, "load_pair", lambda *_, **__: pair)
    assert basics.main(["--section", "hf-batch", "--repeats", "1", "--tokens", "5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert seen == [(rows, 5, who) for _ in range(2) for rows in (1, 3) for who in (None, "ours", "ours")]
    speeds = report["tokens_per_second"]
    assert set(speeds) == {f"{name} {rows}" for name in ("generate", "plain", "sd") for rows in (1, 3)}
    ratio = speeds["sd 3"]["median"] / speeds["generate 3"]["median"]
    assert report["over generate"]["sd 3"] == pytest.approx(ratio, rel=0.01)
