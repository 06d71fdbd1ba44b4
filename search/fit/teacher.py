"""What the target says along a corpus: its next-token laws, as their largest entries and the mass of the rest.

Kept in a folder, shard by shard, so that nothing is lost when making them is interrupted, or made as they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import FitError
from viasd.files import make_folder, write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.search.fit.corpus import Batch, Corpus

TOP = 32
_VERSION = 1
_SHARD = 64  # conversations a file: what is lost at worst when it is interrupted
_PASS_TOKENS = 2048
_CHUNK = 256  # positions whose whole row is held at once
_IDS, _LOGP, _HIDDEN = "ids", "logp", "hidden"


@dataclass(frozen=True)
class TeacherRows:
    """The target's raw laws (temperature 1, no filters) at the scored positions of some conversations, one after the other.

    Attributes:
        ids: The most probable tokens, ``[n, k]`` int64, in falling order.
        logp: Their log-probabilities, ``[n, k]`` float32.
    """

    ids: Tensor
    logp: Tensor

    @property
    def tail(self) -> Tensor:
        """Mass of all tokens that are not among `ids`, ``[n]``."""
        return (1 - self.logp.exp().sum(-1)).clamp_min(0)


class Teacher:
    """The target's rows and hidden states along a corpus.

    Args:
        model: The target.
        corpus: The corpus.
        folder: Where shards are kept, for this and any other target and corpus; None makes everything as it is asked for.
        hidden: Also keep the hidden states after the last layer, before the final norm (2 bytes x d a token).
        top: Entries of a row that are kept.
    """

    def __init__(
        self, model: LayeredModel, corpus: Corpus, folder: Path | None = None, *, hidden: bool = False, top: int = TOP
    ) -> None:
        self.model = model
        self.corpus = corpus
        self.top = min(top, model.vocabulary)
        self._with_hidden = hidden
        self._shards: dict[int, dict[int, dict[str, Tensor]]] = {}
        self._folder = None if folder is None else make_folder(folder / self._digest(), FitError)

    def prepare(self, numbers: Sequence[int], progress: Callable[[int, int], None] = lambda done, of: None) -> None:
        """Makes what the folder lacks for these conversations; without a folder there is nothing to prepare.

        Args:
            numbers: Conversations.
            progress: Receives (shards done, of how many).

        Raises:
            FitError: If a shard can't be written.
        """
        if self._folder is None:
            return
        wanted = sorted({n // _SHARD for n in numbers})
        for done, shard in enumerate(wanted):
            progress(done, len(wanted))
            self._shard(shard)
        progress(len(wanted), len(wanted))

    def rows(self, batch: Batch) -> TeacherRows:
        """Rows at the scored positions of a batch (`Batch.scored`), row by row."""
        ids, logp = [], []
        for row, number in enumerate(batch.numbers):
            made = self._of(number)
            n = int(batch.length[row] - batch.answer[row])
            ids.append(made[_IDS][:n])
            logp.append(made[_LOGP][:n])
        return TeacherRows(torch.cat(ids).long(), torch.cat(logp).float())

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states ``[B, L, d]`` after the last layer, before the final norm; 0 beyond a row's end.

        Raises:
            FitError: If the teacher was not asked to keep them.
        """
        if not self._with_hidden:
            raise FitError("internal: hidden states were asked for, but the teacher keeps none")
        first = self._of(batch.numbers[0])[_HIDDEN]
        out = first.new_zeros((*batch.ids.shape, first.shape[1]))
        for row, number in enumerate(batch.numbers):
            n = int(batch.length[row])
            out[row, :n] = self._of(number)[_HIDDEN][:n]
        return out

    @torch.inference_mode()
    def states(self, batch: Batch, layers: Sequence[int]) -> dict[int, Tensor]:
        """Hidden states that enter some layers, by layer index, each ``[B, L, d]``; made on the spot, never kept.

        Args:
            batch: The conversations.
            layers: Layer indices; ``n_layers`` names the state after the last layer, before the final norm.
        """
        lengths: list[int] = batch.length.tolist()
        _, captured = self._pass([batch.ids[i, :n] for i, n in enumerate(lengths)], tuple(layers))
        padded: dict[int, Tensor] = {}
        for layer, packed in captured.items():
            out = packed.new_zeros((*batch.ids.shape, packed.shape[-1]))
            for i, part in enumerate(packed[0].split(lengths)):
                out[i, : lengths[i]] = part
            padded[layer] = out.clone()
        return padded

    def _of(self, number: int) -> dict[str, Tensor]:
        shard = number // _SHARD
        if self._folder is None:
            return self._make([number])[number]
        return self._shard(shard)[number]

    def _shard(self, shard: int) -> dict[int, dict[str, Tensor]]:
        if shard not in self._shards:
            assert self._folder is not None
            path = self._folder / f"shard-{shard:05d}.safetensors"
            numbers = range(shard * _SHARD, min((shard + 1) * _SHARD, len(self.corpus)))
            if not path.exists():
                made = self._make(numbers)
                tensors = {name: torch.cat([made[n][name] for n in numbers]) for name in made[numbers[0]]}
                write_atomically(path, save(tensors), FitError)
            # What was read back is mapped from the file, so that hidden states need no memory of their own.
            self._shards[shard] = self._parts(path, numbers)
        return self._shards[shard]

    def _parts(self, path: Path, numbers: range) -> dict[int, dict[str, Tensor]]:
        corpus = self.corpus
        lengths = [int(corpus.start[n + 1] - corpus.start[n]) for n in numbers]
        scored = [length - int(corpus.answer[n]) for n, length in zip(numbers, lengths, strict=True)]
        try:
            tensors = load_file(path)
            split = {name: t.split(lengths if name == _HIDDEN else scored) for name, t in tensors.items()}
        except (OSError, SafetensorError, RuntimeError) as error:
            raise FitError(f"the teacher's rows in '{path}' can't be read ({error}); delete the file") from error
        return {n: {name: parts[i] for name, parts in split.items()} for i, n in enumerate(numbers)}

    @torch.inference_mode()
    def _make(self, numbers: Sequence[int]) -> dict[int, dict[str, Tensor]]:
        made: dict[int, dict[str, Tensor]] = {}
        for group in self._passes(numbers):
            texts = [self.corpus.conversation(n) for n in group]
            final, _ = self._pass(texts, ())
            for n, hidden in zip(group, final[0].split([len(t) for t in texts]), strict=True):
                # The row before each token of the answer.
                scored = hidden[int(self.corpus.answer[n]) - 1 : -1]
                ids, logp = self._largest(scored)
                made[n] = {_IDS: ids.int().cpu(), _LOGP: logp.half().cpu()}
                if self._with_hidden:
                    made[n][_HIDDEN] = hidden.to("cpu", torch.bfloat16, copy=True)
        return made

    def _passes(self, numbers: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        size = _PASS_TOKENS
        for n in numbers:
            length = int(self.corpus.start[n + 1] - self.corpus.start[n])
            if size + length > _PASS_TOKENS:
                groups.append([])
                size = 0
            groups[-1].append(n)
            size += length
        return groups

    def _pass(self, texts: Sequence[Tensor], capture: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
        """Texts packed into one pass over all layers; each has a cache of its own, so none sees another."""
        model = self.model
        step = model.step([Segment(model.new_kv(), 0, len(text)) for text in texts])
        return model.run(model.embed(torch.cat(list(texts)).long()), range(model.n_layers), step, capture=capture)

    def _largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        ids, values = [], []
        for chunk in hidden.split(_CHUNK):
            logits = self.model.readout(chunk[None])
            top = logits.topk(self.top, dim=-1)
            ids.append(top.indices)
            # Written out, and in place: half the time of logsumexp on a CPU.
            best = top.values[:, :1]
            values.append(top.values - best - logits.sub_(best).exp_().sum(-1, keepdim=True).log())
        return torch.cat(ids), torch.cat(values)

    def _digest(self) -> str:
        said = {
            "version": _VERSION,
            "corpus": self.corpus.hash,
            "target": asdict(ModelIdentity.of(self.model, "")),
            "form": [self.model.form, str(self.model.dtype), self.model.vocabulary],
            "kept": [self.top, self._with_hidden],
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
