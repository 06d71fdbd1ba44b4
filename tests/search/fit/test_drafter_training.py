"""Training drafters: what a step sees is what decoding sees, the loss and its gradient, the target kept on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import small_corpus, target_pair

from viasd.errors import DrafterError, FitError
from viasd.feature import FeatureDrafterFile, FeatureShape
from viasd.featuremodel import FeatureModel
from viasd.identity import ModelIdentity
from viasd.probe import load_layered
from viasd.search.fit import teaching
from viasd.search.fit.draftloss import judge
from viasd.search.fit.featuretraining import FeatureStack
from viasd.search.fit.standalone import StandaloneShape, StandaloneStack
from viasd.search.fit.teaching import Teacher
from viasd.testing import tiny_model

EVERYTHING = torch.arange(300)


def file_of(stack: FeatureStack, model: Any, shortlist: torch.Tensor = EVERYTHING) -> FeatureDrafterFile:
    return FeatureDrafterFile(stack.shape, stack.weights(), shortlist, ModelIdentity.of(model, "tiny"))


@pytest.mark.parametrize(("family", "depth"), [("llama", 1), ("llama", 2), ("gemma2", 1)])
def test_every_step_of_training_is_what_decoding_computes(family: str, depth: int) -> None:
    model = load_layered(tiny_model(family, num_hidden_layers=3))
    stack = FeatureStack(model, FeatureShape.of(model, depth, inner=40), EVERYTHING, steps=3, seed=4)
    ids = torch.randint(5, 260, (2, 10), generator=torch.Generator().manual_seed(1))
    states = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(2)) * 3
    with torch.no_grad():
        outputs = stack.outputs(states, ids)
        runner = FeatureModel(file_of(stack, model), model)
        for row in range(2):
            tokens = ids[row].tolist()
            for begin in range(6):  # entries up to here see the target's states, two more see the drafter's own
                kv = runner.new_kv()
                hidden = runner.run(states[row : row + 1, : begin + 1], tokens[1 : begin + 2], kv)[:, -1:]
                for step in range(3):
                    torch.testing.assert_close(hidden[0, 0], outputs[step][row, begin + step], rtol=1e-4, atol=1e-4)
                    hidden = runner.run(hidden, [tokens[begin + step + 2]], kv)
            logits = runner.logits(outputs[0][row : row + 1])
            torch.testing.assert_close(logits, stack.rows(outputs[0][row]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 0.7])
def test_loss_and_gradient_are_those_of_the_formula(weight: float) -> None:
    generator = torch.Generator().manual_seed(3)
    head, teach = (torch.randn(11, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    teacher = torch.randn(300, 6, generator=generator, dtype=torch.float64)  # more than are held at one time
    outputs = [torch.randn(300, 6, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    # The shortlist has part of the mass.
    sums = torch.logsumexp(teacher @ teach.T, dim=-1) + 0.3
    found = judge(lambda h: h @ head.T, outputs, teacher, sums, lambda t: t @ teach.T, weight)
    found.loss.sum().backward()
    q = (teacher @ teach.T - sums[:, None]).exp()
    for step, output in enumerate(outputs):
        mine = output.detach().clone().requires_grad_()
        logp = torch.log_softmax(mine @ head.T, dim=-1)
        kl = (q * (q.log() - logp)).sum(-1)
        accept = torch.minimum(logp.exp(), q).sum(-1)
        (kl + weight * (1 - accept)).mean().backward()
        assert output.grad is not None
        assert mine.grad is not None
        torch.testing.assert_close(output.grad.double(), mine.grad, rtol=1e-4, atol=1e-7)
        assert float(found.kl[step]) == pytest.approx(float(kl.detach().sum()), rel=1e-4)
        assert float(found.accept[step]) == pytest.approx(float(accept.detach().sum()), rel=1e-4)
        same = (logp.argmax(-1) == q.argmax(-1)).sum()
        assert int(found.agree[step]) == int(same)


def test_a_teacher_is_what_the_target_says_by_itself_and_is_run_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, corpus = target_pair().target, small_corpus()
    batch = corpus.batch([3, 7, 8])
    states, sums = Teacher(model, corpus, tmp_path).along(batch)
    reference: Any = model.model
    for row, n in enumerate(batch.length.tolist()):
        with torch.no_grad():
            logits = reference(batch.ids[row : row + 1, :n]).logits[0]
        torch.testing.assert_close(model.readout(states[row : row + 1, :n]), logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sums[row, :n], logits.logsumexp(-1), rtol=1e-4, atol=1e-4)
        assert not states[row, n:].any()
    again = Teacher(model, corpus, tmp_path)
    ran: list[int] = []
    run = type(model).run
    monkeypatch.setattr(type(model), "run", lambda self, h, *a, **k: (ran.append(h.shape[1]), run(self, h, *a, **k))[1])
    assert torch.equal(again.along(batch)[0], states)
    assert ran == []
    again.along(corpus.batch([3, 4]))
    assert ran == [len(corpus.conversation(4))]


def test_a_conversation_that_was_cut_is_run_anew_when_more_of_it_is_wanted(tmp_path: Path) -> None:
    model, corpus = target_pair().target, small_corpus()
    teacher = Teacher(model, corpus, tmp_path)
    short, _ = teacher.along(corpus.batch([5], max_length=9))
    whole, _ = teacher.along(corpus.batch([5]))
    torch.testing.assert_close(whole[:, :9], short, rtol=1e-4, atol=1e-4)
    assert bool(whole[:, 9:].any())


def test_a_full_disk_is_said_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 10})()
    monkeypatch.setattr(teaching.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(FitError, match="hidden states along this corpus take"):
        Teacher(target_pair().target, small_corpus(), tmp_path)


def taught(stack: Any, teacher: Teacher, steps: int = 40, lr: float = 3e-3) -> tuple[list[float], list[float]]:
    """KL per step ahead on a batch before and after training on it."""
    batch = small_corpus().batch(range(30))
    optimizer = torch.optim.Adam(stack.parameters(), lr=lr)
    seen = []
    for _ in range(steps):
        found, n = stack.judged(batch, teacher, 1.0)
        seen.append((found.kl / n).tolist())
        optimizer.zero_grad()
        found.loss.mean().backward()
        optimizer.step()
    return seen[0], seen[-1]


def test_both_kinds_learn_and_the_target_does_not(tmp_path: Path) -> None:
    model = load_layered(tiny_model("llama", num_hidden_layers=3))
    before = {name: p.clone() for name, p in model.model.named_parameters()}
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    teacher = Teacher(model, small_corpus(), tmp_path)
    feature = FeatureStack(model, FeatureShape.of(model), EVERYTHING, steps=2)
    first, last = taught(feature, teacher)
    assert all(b < 0.7 * a for a, b in zip(first, last, strict=True))
    alone = StandaloneStack(model, StandaloneShape(16, 1, 32), small_corpus().tokens.long(), EVERYTHING)
    first, last = taught(alone, teacher)
    assert last[0] < 0.7 * first[0]
    assert all(torch.equal(before[name], p) for name, p in model.model.named_parameters())


def test_a_standalone_model_says_what_its_training_said(tmp_path: Path) -> None:
    model = target_pair().target
    words = torch.tensor([7, 40, 41, 100, 250])
    stack = StandaloneStack(model, StandaloneShape(16, 2, 32), small_corpus().tokens.long(), words)
    ids = small_corpus().batch([1]).ids
    with torch.no_grad():
        own = stack.rows(stack.outputs(ids)[0] @ stack.leave.T)
        logits = stack.as_model()(ids).logits[0]
    torch.testing.assert_close(own, logits[:, words], rtol=1e-3, atol=1e-4)


def test_a_drafter_wider_than_its_target_is_refused() -> None:
    with pytest.raises(FitError, match="at most as wide as its target"):
        StandaloneStack(target_pair().target, StandaloneShape(48, 1, 32), small_corpus().tokens.long(), EVERYTHING)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file() -> FeatureDrafterFile:
    model = target_pair().target
    stack = FeatureStack(model, FeatureShape.of(model), torch.tensor([5, 9, 200]), steps=1)
    return file_of(stack, model, torch.tensor([5, 9, 200]))


def test_a_file_comes_back_as_it_was(file: FeatureDrafterFile, tmp_path: Path) -> None:
    file.save(tmp_path / "d.safetensors")
    again = FeatureDrafterFile.load(tmp_path / "d.safetensors")
    assert again.digest == file.digest
    assert again.shape == file.shape
    assert again.target == file.target
    again.check(target_pair().target, "tiny")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_hidden_layers": 4}, "architecture"),
        ({"num_hidden_layers": 3, "hidden_size": 64}, "architecture"),
    ],
)
def test_another_target_is_refused_by_what_differs(file: FeatureDrafterFile, other: dict[str, Any], named: str) -> None:
    model = load_layered(tiny_model("llama", **other))
    with pytest.raises(DrafterError, match=f"the {named} of other is another"):
        file.check(model, "other")


def test_other_weights_are_refused(file: FeatureDrafterFile) -> None:
    changed = tiny_model("llama", num_hidden_layers=3)
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    with pytest.raises(DrafterError, match="the weights of other"):
        file.check(load_layered(changed), "other")


def test_a_record_says_how_often_it_is_believed(file: FeatureDrafterFile) -> None:
    assert file.chances is None
    for places, chances in (([0.4, 0.5, 0.7], (0.4, 0.6)), ([0.4], (0.4, 0.4)), ([], None), ("often", None)):
        said = replace(file, details={"decoded": {"by_place": places}})
        assert said.chances == (None if chances is None else pytest.approx(chances))


def test_damaged_files_say_what_is_wrong(file: FeatureDrafterFile, tmp_path: Path) -> None:
    path = tmp_path / "d.safetensors"
    with pytest.raises(DrafterError, match="can't read"):
        FeatureDrafterFile.load(path)
    path.write_bytes(b"no such thing")
    with pytest.raises(DrafterError, match="no file of a feature drafter"):
        FeatureDrafterFile.load(path)
    broken = dict(file.weights)
    name = next(iter(broken))
    broken[name] = broken[name] * torch.nan
    with pytest.raises(DrafterError, match="not finite"):
        FeatureDrafterFile(file.shape, broken, file.shortlist, file.target)
    del broken[name]
    with pytest.raises(DrafterError, match=name.replace(".", r"\.")):
        FeatureDrafterFile(file.shape, broken, file.shortlist, file.target)
    for words in ([9, 5], [5], [-1, 5]):
        with pytest.raises(DrafterError, match="ascending token ids"):
            FeatureDrafterFile(file.shape, file.weights, torch.tensor(words), file.target)
