"""Light heads: what the target would say, read off after some of its layers (AdaDecode, arXiv 2506.03700).

``logits = softcap(E* (T norm(h)))`` with the target's own LM head E* and final norm, both frozen, and one trained ``[d, d]``
matrix T per exit; with T the identity a head is the logit lens. Reading E* is what a head costs, so it may be cut to a
shortlist of words: a word outside has probability 0, which is a law like any other and stays exact where it is tested. A
probe, one row of width d, says beforehand whether a head is worth reading at all.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from viasd.artefacts import read_artefact
from viasd.errors import HeadsError, OptionError
from viasd.files import write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.products import Dense
from viasd.shortlist import UNKNOWN, ShortRow, ShortTable

SCHEMA_VERSION = 1
LENS = "lens:"
_META = "viasd"  # the one entry of the file's metadata, JSON
UNIT_EPS = 1e-6  # of `unit`


@dataclass(frozen=True, eq=False)
class LightHeads:
    """Heads of one target, with provenance.

    Attributes:
        exits: Numbers of layers after which there is a head, ascending: 7 reads the state behind layers 0 to 6.
        transforms: T of each exit, ``[exits, d, d]``; None is the identity everywhere.
        shortlist: Token ids ``[m]`` that the heads know, ascending; None is the whole vocabulary.
        probes: Per exit the weights and, last, the bias ``[exits, d + 1]`` of the logit that the head's best token is the
            target's; None is no probe.
        target: Identity of the target they were trained for, None for heads made on the spot.
        name: Where they came from, for people.
        details: Everything else the file carries (corpus hash, figures, calibration, versions).
    """

    exits: tuple[int, ...]
    transforms: Tensor | None = None
    shortlist: Tensor | None = None
    probes: Tensor | None = None
    target: ModelIdentity | None = None
    name: str = "heads"
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.exits)
        if not n or list(self.exits) != sorted(set(self.exits)) or self.exits[0] < 1:
            raise HeadsError(f"exits of {self.name} must be ascending layer counts of at least 1, but got {self.exits}")
        if self.transforms is not None and (
            self.transforms.dim() != 3 or self.transforms.shape[0] != n or len(set(self.transforms.shape[1:])) != 1
        ):
            raise HeadsError(
                f"{self.name} must have one square matrix per exit ({n}), but the shape is {tuple(self.transforms.shape)}"
            )
        if self.shortlist is not None and (
            self.shortlist.dim() != 1 or len(self.shortlist) < 2 or not bool((self.shortlist.diff() > 0).all())
        ):
            raise HeadsError(f"the shortlist of {self.name} must be ascending token ids, two or more")
        if self.probes is not None and (self.probes.dim() != 2 or self.probes.shape[0] != n):
            raise HeadsError(f"{self.name} must have one probe per exit, but the shape is {tuple(self.probes.shape)}")
        for what in (self.transforms, self.probes):
            if what is not None and not bool(what.isfinite().all()):
                raise HeadsError(f"{self.name} has numbers that are not finite; train the heads anew")

    @classmethod
    def lens(cls, exits: Sequence[int]) -> LightHeads:
        """The logit lens: untrained heads, T the identity, the whole vocabulary."""
        return cls(tuple(exits), name=LENS + ",".join(map(str, exits)))

    @cached_property
    def digest(self) -> str:
        """Hash of exits and weights: two files of one digest are the same heads."""
        digest = hashlib.sha256(repr(self.exits).encode())
        for tensor in (self.transforms, self.shortlist, self.probes):
            digest.update(b"-" if tensor is None else tensor.double().numpy().tobytes())
        return digest.hexdigest()[:16]

    def check(self, model: LayeredModel, model_id: str) -> str | None:
        """Compares the heads with the target they are about to be used on.

        Returns:
            A warning for people where they fit but the weights are not those they were trained for, else None.

        Raises:
            HeadsError: If layers, width, vocabulary or architecture do not fit.
        """
        if self.exits[-1] >= model.n_layers:
            raise HeadsError(
                f"{self.name} exits after {self.exits[-1]} layers, but {model_id} has {model.n_layers} and an exit must "
                "leave at least one; use heads made for this target"
            )
        width = model.config.hidden_size
        for what, tensor, found in (
            ("width", self.transforms, None if self.transforms is None else self.transforms.shape[-1]),
            ("probe width", self.probes, None if self.probes is None else self.probes.shape[-1] - 1),
        ):
            if tensor is not None and found != width:
                raise HeadsError(f"{self.name} has {what} {found}, but {model_id} has {width}; use heads made for it")
        if self.shortlist is not None and not 0 <= int(self.shortlist[0]) <= int(self.shortlist[-1]) < model.vocabulary:
            raise HeadsError(
                f"the shortlist of {self.name} must lie in 0..{model.vocabulary - 1}, the vocabulary of {model_id}, but "
                f"goes from {int(self.shortlist[0])} to {int(self.shortlist[-1])}; use heads made for this target"
            )
        if self.target is None:
            return None
        difference = self.target.difference(model)
        if difference == "architecture":
            raise HeadsError(
                f"{self.name} was trained for {self.target.id}, whose architecture differs from {model_id}'s; "
                "use heads made for this target"
            )
        if difference is not None:
            return (
                f"{self.name} was trained on {self.target.id}; the weights of {model_id} are others, so it may be right "
                "less often (what is verified stays exact)"
            )
        return None

    def bind(self, model: LayeredModel) -> dict[int, ExitHead]:
        """The heads at work on a target, by exit. The cut LM head is made once for all of them."""
        head = model.head_rows(self.shortlist)
        return {
            layers: ExitHead(
                model,
                head,
                None if self.transforms is None else self.transforms[i],
                self.shortlist,
                None if self.probes is None else self.probes[i],
                f"{self.digest}:{layers}",
            )
            for i, layers in enumerate(self.exits)
        }

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, to a temporary name first.

        Raises:
            HeadsError: If it can't be written.
        """
        tensors = {"transforms": self.transforms, "shortlist": self.shortlist, "probes": self.probes}
        about = {
            "schema": SCHEMA_VERSION,
            "name": self.name,
            "exits": list(self.exits),
            "target": None if self.target is None else asdict(self.target),
            **self.details,
        }
        held = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
        data = safetensors.torch.save(held, {_META: json.dumps(about)})
        write_atomically(Path(path), data, HeadsError)

    @classmethod
    def load(cls, path: str | Path) -> LightHeads:
        """Reads a file that `save` wrote.

        Raises:
            HeadsError: If it can't be read or holds something else.
        """
        about, tensors = read_artefact(path, _META, "heads file", "file of light heads", HeadsError)
        if not isinstance(about, dict) or about.get("schema") != SCHEMA_VERSION:
            found = about.get("schema") if isinstance(about, dict) else None
            raise HeadsError(
                f"expected light heads of schema {SCHEMA_VERSION} in '{path}', but found {found!r}; make them by "
                "viasd-fit heads"
            )
        if unknown := sorted(set(tensors) - {"transforms", "shortlist", "probes"}):
            raise HeadsError(f"'{path}' has a tensor '{unknown[0]}' that light heads do not have")
        try:
            identity = None if about["target"] is None else ModelIdentity(**about["target"])
            exits = tuple(int(e) for e in about["exits"])
            name = str(about["name"])
        except (KeyError, TypeError, ValueError) as error:
            raise HeadsError(f"'{path}' must say exits, name and target, but {error!r}") from error
        details = {k: v for k, v in about.items() if k not in ("schema", "name", "exits", "target")}
        return cls(exits, **tensors, target=identity, name=name, details=details)


class ExitHead:
    """One head on its target: hidden states ``[1, n, d]`` at its exit -> raw logits ``[n, V]``, -1e4 off the shortlist.

    Args:
        model: The target.
        head: Its LM head, cut to the shortlist (`LayeredModel.head_rows`).
        transform: T ``[d, d]``, None for the identity.
        shortlist: Token ids ``[m]``, None for all.
        probe: ``[d + 1]``, None for none.
        key: Names these weights; heads of one key are equal.
    """

    def __init__(
        self,
        model: LayeredModel,
        head: Callable[[Tensor], Tensor],
        transform: Tensor | None,
        shortlist: Tensor | None,
        probe: Tensor | None,
        key: str,
    ) -> None:
        self.key = key
        self._model = model
        self._head = head
        self._shortlist = None if shortlist is None else shortlist.to(model.device, torch.long)
        self._probe = None if probe is None else (probe[:-1].to(model.device, torch.float32), float(probe[-1]))
        self._turn: Callable[[Tensor], Tensor] | None = None
        if transform is not None:
            self._turn = model.product(Dense(transform.to(model.device, model.dtype).contiguous()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExitHead) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __call__(self, hidden: Tensor) -> Tensor:
        """See `viasd.routes.Readout`."""
        logits = self._model.readout(hidden, self._turned)
        if self._shortlist is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._model.vocabulary), UNKNOWN)
        return whole.index_copy_(1, self._shortlist.to(logits.device), logits)

    def row(self, hidden: Tensor) -> ShortRow:
        """Raw logits of the words that this head knows, for the hidden states ``[1, 1, d]`` of one token."""
        known = self._model.readout(hidden, self._turned)
        words = None if self._shortlist is None else self._shortlist.to(known.device)
        return ShortRow(ShortTable(known, words, self._model.vocabulary), 0)

    def promise(self, hidden: Tensor) -> float | None:
        """Chance that this head would be right at hidden states ``[1, 1, d]``, by the probe alone; None without one."""
        if self._probe is None:
            return None
        weights, bias = self._probe
        # The probe reads the state at unit root mean square, so that it needs no norm of the model's. This is `unit` in a
        # few small products: it is asked at every exit, and overhead is all it costs.
        state = hidden[0, -1].float()
        scale = (float(state @ state) / state.shape[0] + UNIT_EPS) ** -0.5
        return 0.5 + 0.5 * math.tanh(0.5 * (float(state @ weights) * scale + bias))  # a sigmoid that never overflows

    def _turned(self, normed: Tensor) -> Tensor:
        return self._head(normed if self._turn is None else self._turn(normed))


def unit(rows: Tensor) -> Tensor:
    """Rows ``[..., d]`` scaled to a root mean square of 1."""
    return rows * torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + UNIT_EPS)


def parse_exits(text: str) -> tuple[int, ...]:
    """``7,15,22`` -> exits, ascending.

    Raises:
        OptionError: If it is something else.
    """
    try:
        exits = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(f"expected layer counts such as 7,15,22, but got '{text}'") from error
    if list(exits) != sorted(set(exits)) or exits[0] < 1:
        raise OptionError(f"exits must be ascending layer counts of at least 1, but got '{text}'")
    return exits
