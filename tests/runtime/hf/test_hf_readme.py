"""What the README says about transformers works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import viasd.search.cli

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.weights
def test_the_section_inside_transformers(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    section = README.read_text(encoding="utf-8").split("### Inside transformers\n")[1].split("\n### ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    outputs: list[Any] = []

    class Seen(dict[str, Any]):
        def __setitem__(self, name: str, value: Any) -> None:
            super().__setitem__(name, value)
            outputs.extend([value] if name == "out" else [])

    names = Seen()
    exec(program, names)
    expected = names["model"].generate(**names["inputs"], max_new_tokens=20)
    assert len(outputs) == 4
    first, tiers, stopped, folder = outputs
    assert torch.equal(first, expected)
    assert torch.equal(tiers.sequences, expected)
    assert torch.equal(folder, expected)
    assert torch.equal(stopped[0], expected[0, : stopped.shape[1]])
    assert tiers.viasd[0].stats.slim_calls > 0
    assert capsys.readouterr().out.startswith("One, two, three")
    (command,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    words = shlex.split(command, comments=True)
    assert words.pop(0) == "viasd-search"
    assert viasd.search.cli.main(words) == 0
    drafter = type(names["model"]).from_pretrained("slim", dtype=torch.float32)
    assert drafter.config.num_hidden_layers == 24
