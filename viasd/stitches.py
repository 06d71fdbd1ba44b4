"""The stitches of a mask as a file: loaded with checks, saved with where they came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from viasd.errors import MaskError
from viasd.files import why, write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.routes import Route
from viasd.stitch import Stitch

SCHEMA_VERSION = 1
SUFFIX = ".safetensors"
_HEADER = "viasd"
_FACTORS = {1: ("weight",), 2: ("down", "up")}


@dataclass(frozen=True, eq=False)
class Stitches:
    """The stitches of one mask, with provenance.

    Attributes:
        maps: Layer index -> the stitch applied before that layer; the number of layers names the one before the readout.
        target: The target whose hidden states they were fitted to.
        keep: The mask's flags.
        details: Where they came from (corpus and its hash, tokens, ridge, rank, training ...), JSON-able.
        file: Name of the file they were read from or written to, None where there is none yet.
    """

    maps: Mapping[int, Stitch]
    target: ModelIdentity
    keep: tuple[bool, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    file: str | None = None

    def __post_init__(self) -> None:
        route = Route(self.keep)
        allowed = {i for i in (*route.layers, len(self.keep)) if i > route.first_gap}
        if not self.maps or not set(self.maps) <= allowed:
            raise MaskError(
                f"stitches must be before layers that the mask keeps after its first gap, {_numbers(allowed)}, but these "
                f"are before {_numbers(self.maps)}"
            )
        if len({stitch.width for stitch in self.maps.values()}) > 1:
            raise MaskError("stitches must all be of one width, but these are of several")

    @property
    def parameters(self) -> int:
        """Numbers in all of them."""
        return sum(stitch.parameters for stitch in self.maps.values())

    @property
    def ranks(self) -> dict[int, int | None]:
        """Rank by layer, None for a whole matrix: what their cost depends on."""
        return {index: self.maps[index].rank for index in sorted(self.maps)}

    @cached_property
    def content(self) -> bytes:
        """The file."""
        tensors: dict[str, Tensor] = {}
        for index, stitch in self.maps.items():
            for name, factor in zip(_FACTORS[len(stitch.factors)], stitch.factors, strict=True):
                tensors[f"{index}.{name}"] = factor.contiguous()
            tensors[f"{index}.shift"] = stitch.shift.contiguous()
        header = {
            "schema": SCHEMA_VERSION,
            "target": asdict(self.target),
            "keep": [int(k) for k in self.keep],
            "details": dict(self.details),
        }
        return save(tensors, {_HEADER: json.dumps(header, sort_keys=True)})

    @cached_property
    def sha256(self) -> str:
        """Of the file."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def reference(self) -> dict[str, Any]:
        """How a mask file names them."""
        before = {str(index): rank for index, rank in self.ranks.items()}
        return {"file": self.file, "sha256": self.sha256, "before": before, **self.details}

    def named(self, file: str) -> Stitches:
        """The same, of a file of that name."""
        copy = replace(self, file=file)
        vars(copy)["content"] = self.content
        return copy

    def save(self, path: Path) -> None:
        """Writes the file, to a temporary name first.

        Raises:
            MaskError: If it can't be written.
        """
        write_atomically(path, self.content, MaskError)

    @classmethod
    def load(cls, path: Path, sha256: str | None = None) -> Stitches:
        """Reads a file.

        Args:
            path: The file.
            sha256: What its content must be, None for anything.

        Raises:
            MaskError: If it can't be read, is another one, or holds no stitches.
        """
        try:
            content = path.read_bytes()
        except OSError as error:
            raise MaskError(f"can't read stitches file '{path}': {why(error)}; put it beside the mask file") from error
        found = hashlib.sha256(content).hexdigest()
        if sha256 is not None and found != sha256:
            raise MaskError(
                f"stitches file '{path}' is not the one the mask was made with (its SHA-256 begins with {found[:12]}, "
                f"expected {sha256[:12]}); fit the stitches anew, or put the right file there"
            )
        try:
            return cls._parsed(content, path)
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise MaskError(f"stitches file '{path}' is not one that viasd writes: {error!r}") from error

    @classmethod
    def _parsed(cls, content: bytes, path: Path) -> Stitches:
        # Safetensors begin with the length of their header and the header itself.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"][_HEADER]
        said = json.loads(header)
        if said["schema"] != SCHEMA_VERSION:
            raise MaskError(
                f"stitches file '{path}' has schema {said['schema']!r}, but this version reads {SCHEMA_VERSION}; fit the "
                "stitches anew or use a matching version of viasd"
            )
        tensors = load(content)
        maps: dict[int, Stitch] = {}
        for index in sorted({int(name.partition(".")[0]) for name in tensors}):
            names = next(n for n in _FACTORS.values() if f"{index}.{n[0]}" in tensors)
            factors = tuple(tensors[f"{index}.{name}"] for name in names)
            shift = tensors[f"{index}.shift"]
            chain = [shift.shape[0], *(f.shape[1] for f in factors)]
            if [f.shape[0] for f in factors] != chain[:-1] or chain[-1] != chain[0]:
                raise ValueError(f"shapes before layer {index} don't fit together")
            if not all(torch.isfinite(t).all() for t in (*factors, shift)):
                raise ValueError(f"the stitch before layer {index} holds NaN or infinity")
            maps[index] = Stitch(factors, shift)
        keep = tuple(bool(k) for k in said["keep"])
        made = cls(maps, ModelIdentity(**said["target"]), keep, said["details"], path.name)
        vars(made)["content"] = content
        return made

    def check(self, model: LayeredModel, model_id: str) -> None:
        """Compares the stitches with the target they are about to be used on.

        Raises:
            MaskError: If they were fitted to another one: unlike a mask they can't be of use there.
        """
        if (difference := self.target.difference(model)) is not None:
            other = "another architecture" if difference == "architecture" else "other weights"
            raise MaskError(
                f"the stitches {self.file or ''} were fitted to {other} than {model_id}'s, those of {self.target.id}; "
                "fit them anew for this target, or use the mask without them"
            )


def _numbers(layers: Iterable[int]) -> str:
    return " ".join(map(str, sorted(layers))) or "none"
