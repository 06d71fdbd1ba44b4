"""What a target thinks along a corpus, kept on disk: its last hidden states, from which its rows are read off again.

A drafter goes over its corpus several times, and the target's passes are most of the work of the first. Kept are the
states behind the last layer in the target's own dtype and the log of the sum over its whole vocabulary, so that the rows
over a shortlist are exact and cost one small product. A conversation is run when it is first asked for; what has been run
stays, also for another drafter of the same target and corpus.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.errors import FitError
from viasd.files import make_folder
from viasd.layered import LayeredModel
from viasd.search.fit.corpus import Batch, Corpus

_ROWS = 64  # positions whose rows over the whole vocabulary exist at one time: few enough for a cache
_SPARE = 1.05  # of the disk that must be free


class Teacher:
    """Hidden states of a target along the conversations of a corpus.

    Args:
        model: The target.
        corpus: The conversations.
        folder: Where they are kept; of this target and corpus alone.

    Attributes:
        model: The target.
        folder: The folder.

    Raises:
        FitError: If the folder can't be written, or the disk has no room.
    """

    def __init__(self, model: LayeredModel, corpus: Corpus, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self._corpus = corpus
        self._width = int(model.config.hidden_size)
        tokens = corpus.tokens.shape[0]
        make_folder(folder, FitError)
        self._run = _array(folder / "run.i32", np.int32, (len(corpus),))
        self._sums = _array(folder / "sums.f32", np.float32, (tokens,))
        self._dtype = model.dtype
        kind = np.dtype({1: np.int8, 2: np.int16, 4: np.int32}[torch.empty(0, dtype=self._dtype).element_size()])
        self._states = _array(folder / "states.bin", kind, (tokens, self._width))

    @torch.no_grad()
    def along(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """States ``[B, L, d]`` in the target's dtype, 0 beyond a row's end, and log-sums ``[B, L]`` of a batch."""
        lengths = batch.length.tolist()
        self._complete(batch, lengths)
        states = torch.zeros((*batch.ids.shape, self._width), dtype=self._dtype)
        sums = torch.zeros(batch.ids.shape)
        for row, (number, n) in enumerate(zip(batch.numbers, lengths, strict=True)):
            start = int(self._corpus.start[number])
            states[row, :n] = torch.from_numpy(self._states[start : start + n].copy()).view(self._dtype)
            sums[row, :n] = torch.from_numpy(self._sums[start : start + n].copy())
        return states, sums

    def _complete(self, batch: Batch, lengths: list[int]) -> None:
        """Runs what has not been run, all of it in one pass."""
        missing = [i for i, n in enumerate(batch.numbers) if self._run[n] < lengths[i]]
        if not missing:
            return
        model = self.model
        step = model.step([Segment(model.new_kv(), 0, lengths[i]) for i in missing])
        ids = torch.cat([batch.ids[i, : lengths[i]] for i in missing])
        final, _ = model.run(model.embed(ids), range(model.n_layers), step)
        sums = torch.cat([model.readout(chunk).logsumexp(dim=-1) for chunk in final.split(_ROWS, dim=1)]).cpu()
        states = final[0].cpu()
        offset = 0
        for i in missing:
            n, start = lengths[i], int(self._corpus.start[batch.numbers[i]])
            rows = states[offset : offset + n].contiguous()
            self._states[start : start + n] = rows.view(_INTEGERS[rows.element_size()]).numpy()
            self._sums[start : start + n] = sums[offset : offset + n].numpy()
            offset += n
        # The states first: a conversation that counts as run must be there after any crash.
        self._states.flush()
        self._sums.flush()
        for i in missing:
            self._run[batch.numbers[i]] = lengths[i]
        self._run.flush()


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _array(path: Path, kind: np.typing.DTypeLike, shape: tuple[int, ...]) -> np.memmap:
    """An array on disk, of zeros where it is new."""
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    try:
        if not path.exists() or path.stat().st_size != size:
            free = shutil.disk_usage(path.parent).free
            if free < size * _SPARE:
                raise FitError(
                    f"the target's hidden states along this corpus take {size / 2**30:.1f} GiB, but only "
                    f"{free / 2**30:.1f} GiB are free at '{path.parent}'; name another folder (--work), or give less text"
                )
            return np.memmap(path, dtype=kind, mode="w+", shape=shape)
        return np.memmap(path, dtype=kind, mode="r+", shape=shape)
    except OSError as error:
        raise FitError(f"can't keep hidden states in '{path.parent}': {error.strerror or error}") from error
