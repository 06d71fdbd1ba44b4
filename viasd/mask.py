"""Mask files: which layers of which target a slim verifier keeps, and where that mask came from."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from viasd.errors import MaskError
from viasd.files import write_atomically
from viasd.identity import ModelIdentity
from viasd.layered import LayeredModel
from viasd.routes import ATTENTION, MLP, PARTS, Readout, Route
from viasd.stitches import SUFFIX, Stitches

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class LayerMask:
    """Layers a slim verifier keeps, with provenance.

    Attributes:
        keep: One flag a layer; True runs, False is skipped.
        name: Where it came from, for people: a file, ``even:0.45``, a study.
        pair: Pair it was searched for, or None.
        target: Identity of the target it belongs to, or None for a mask made on the spot.
        partial: Layers of which only one half runs, as (index, ``attention`` or ``mlp``); their `keep` is False.
        details: Everything else the file carries (cost, seed, versions, guard coefficients ...), untouched.
        stitches: Affine maps across the gaps, which the slim pass applies (see `viasd.stitches`), or None.
    """

    keep: tuple[bool, ...]
    name: str = "mask"
    pair: str | None = None
    target: ModelIdentity | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    partial: tuple[tuple[int, str], ...] = ()
    prefix: int | None = None
    heads: str | None = None
    head: Readout | None = field(default=None, compare=False)
    stitches: Stitches | None = None

    def __post_init__(self) -> None:
        if len(self.keep) < 2:
            raise MaskError(f"a mask needs at least two layers, but got {len(self.keep)}")
        if self.prefix is not None:
            n = len(self.keep)
            if not 0 < self.prefix < n or self.partial or self.keep != tuple(i < self.prefix for i in range(n)):
                raise MaskError(
                    f"mask '{self.name}' ends in a head behind layer {self.prefix}, so it must keep the layers before that, "
                    f"at least one and not all {n}, and no other"
                )
            return
        if not self.keep[0] or not self.keep[-1]:
            raise MaskError(
                f"mask '{self.name}' skips the {'first' if not self.keep[0] else 'last'} layer; both must be kept"
            )
        if self.stitches is None:
            return
        if self.partial:
            raise MaskError(
                f"mask '{self.name}' skips attention and MLP separately, and only whole layers can be stitched; leave out "
                "the stitches or use a mask of whole layers"
            )
        if self.stitches.keep != self.keep:
            raise MaskError(
                f"the stitches of mask '{self.name}' were fitted for another mask of the target; fit them anew for this one"
            )

    @classmethod
    def even(cls, n_layers: int, skip_ratio: float) -> LayerMask:
        """Skips ``round(skip_ratio * n_layers)`` inner layers, spread evenly; first and last are kept.

        Raises:
            MaskError: If `skip_ratio` is not in ``[0, 1)`` or leaves fewer layers than the two that are always kept.
        """
        if not 0 <= skip_ratio < 1:
            raise MaskError(f"skip ratio must be at least 0 and below 1, but got {skip_ratio:g}")
        skipped = round(skip_ratio * n_layers)
        inner = n_layers - 2
        if skipped > inner:
            raise MaskError(
                f"skip ratio {skip_ratio:g} would skip {skipped} of {n_layers} layers, but first and last are always "
                f"kept; at most {inner / n_layers:.2f} is possible"
            )
        gone = {1 + int((i + 0.5) * inner / skipped) for i in range(skipped)}
        return cls(tuple(i not in gone for i in range(n_layers)), name=f"even:{skip_ratio:g}")

    @classmethod
    def first(cls, n_layers: int, layers: int, heads: str | None = None) -> LayerMask:
        """The first `layers` layers, read out by a light head.

        Raises:
            MaskError: If that is none or all of them.
        """
        keep = tuple(i < layers for i in range(n_layers))
        return cls(keep, name=f"prefix:{layers}", prefix=layers, heads=heads)

    @property
    def route(self) -> Route:
        """The route this mask describes."""
        return Route(self.keep, self.partial, self.head, None if self.stitches is None else self.stitches.maps)

    @property
    def skip_ratio(self) -> float:
        """Share of layers skipped."""
        return self.route.skip_ratio

    @property
    def digest(self) -> str:
        """Short hash of the layers it keeps, of the head it ends in and of its stitches."""
        ends = [] if self.head is None else [self.head.key]
        stitches = [] if self.stitches is None else [self.stitches.sha256]
        return hashlib.sha256(repr((self.keep, self.partial, *ends, *stitches)).encode()).hexdigest()[:16]

    def check(self, model: LayeredModel, model_id: str) -> str | None:
        """Compares the mask with the target it is about to be used on.

        Returns:
            A warning for people when the layers fit but the weights are not those of the search, else None.

        Raises:
            MaskError: If layer count or architecture differ, or the stitches were fitted to other weights.
        """
        if len(self.keep) != model.n_layers:
            raise MaskError(
                f"mask '{self.name}' has {len(self.keep)} layers, but {model_id} has {model.n_layers}; "
                "use a mask made for this target, or --mask even:0.45"
            )
        if self.partial and not model.runs_parts:
            raise MaskError(
                f"mask '{self.name}' skips attention and MLP separately, which {model.name} can't do; "
                "use a mask of whole layers"
            )
        if self.stitches is not None:
            self.stitches.check(model, model_id)
        if self.target is None:
            return None
        difference = self.target.difference(model)
        if difference == "architecture":
            raise MaskError(
                f"mask '{self.name}' was made for {self.target.id}, whose architecture differs from {model_id}'s "
                "though the layer count is the same; use a mask made for this target"
            )
        if difference is not None:
            return (
                f"mask '{self.name}' was searched on {self.target.id}; the weights of {model_id} are others, "
                "so its cost and guard figures may not hold"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        """The mask as the JSON object of the file format."""
        return {
            "schema": SCHEMA_VERSION,
            "name": self.name,
            "pair": self.pair,
            "target": None if self.target is None else asdict(self.target),
            "layers": len(self.keep),
            "keep": [int(k) for k in self.keep],
            **({"sublayers": self._sublayers()} if self.partial else {}),
            **({} if self.prefix is None else {"prefix": self.prefix, "heads": self.heads}),
            **({} if self.stitches is None else {"stitches": self.stitches.reference}),
            "skip_ratio": round(self.skip_ratio, 6),
            **self.details,
        }

    def _sublayers(self) -> dict[str, list[int]]:
        parts = dict(self.partial)
        return {half: [int(k or parts.get(i) == half) for i, k in enumerate(self.keep)] for half in PARTS}

    @classmethod
    def from_json(cls, data: Any, name: str, folder: Path | None = None) -> LayerMask:
        """Reads the JSON object of the file format.

        Args:
            data: The object.
            name: For messages, and where it has none itself.
            folder: Where the file of its stitches lies, if it has any.

        Raises:
            MaskError: If it is not such an object, naming the field, or its stitches are not those that it names.
        """
        if not isinstance(data, dict):
            raise MaskError(f"mask '{name}' must be a JSON object, but is a {type(data).__name__}")
        if data.get("schema") != SCHEMA_VERSION:
            raise MaskError(
                f"mask '{name}' has schema {data.get('schema')!r}, but this version reads {SCHEMA_VERSION}; "
                "make the mask anew or use a matching version of viasd"
            )
        keep = data.get("keep")
        if not isinstance(keep, list) or any(k not in (0, 1) or isinstance(k, float) for k in keep):
            raise MaskError(f"mask '{name}': 'keep' must be a list of 0 and 1, one a layer")
        if data.get("layers") != len(keep):
            raise MaskError(f"mask '{name}': 'layers' says {data.get('layers')!r}, but 'keep' has {len(keep)} entries")
        _check_details(data, name)
        partial = _partial(data.get("sublayers"), keep, name)
        target = data.get("target")
        try:
            identity = None if target is None else ModelIdentity(**target)
        except TypeError as error:
            raise MaskError(f"mask '{name}': 'target' must have id, config and weights, but got {target!r}") from error
        known = {
            *("schema", "name", "pair", "target", "layers", "keep", "sublayers", "stitches", "skip_ratio"),
            *("prefix", "heads"),
        }
        details = {k: v for k, v in data.items() if k not in known}
        prefix, heads = data.get("prefix"), data.get("heads")
        if prefix is not None and (not isinstance(prefix, int) or isinstance(prefix, bool)):
            raise MaskError(f"mask '{name}': 'prefix' must be a number of layers, but got {prefix!r}"[:300])
        return cls(
            tuple(bool(k) for k in keep),
            data.get("name") or name,
            data.get("pair"),
            identity,
            details,
            partial,
            prefix,
            heads,
            stitches=_stitches(data.get("stitches"), name, folder),
        )

    def save(self, path: str | Path) -> None:
        """Writes the mask as JSON, to a temporary name first, and before it the file of its stitches beside it, if any."""
        path, mask = Path(path), self
        if self.stitches is not None:
            beside = path.with_suffix(SUFFIX)
            self.stitches.save(beside)
            mask = replace(self, stitches=self.stitches.named(beside.name))
        write_atomically(path, json.dumps(mask.to_json(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> LayerMask:
        """Reads a mask file.

        Raises:
            MaskError: If it can't be read or is not a mask.
        """
        try:
            data = json.loads(
                Path(path).read_text(encoding="utf-8-sig"),
                parse_constant=_no_constant,
                parse_float=_finite,
                parse_int=_whole,
            )
        except OSError as error:
            raise MaskError(f"can't read mask file '{path}': {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or numbers and nesting beyond all reason
            raise MaskError(f"mask file '{path}' is not JSON: {error}") from error
        mask = cls.from_json(data, str(path), Path(path).parent)
        # The file's own words stay relative to it, so that the two can be moved together.
        return mask if mask.heads is None else replace(mask, heads=str(Path(path).parent / mask.heads))


# Entries that a search writes as objects; its readers rely on that.
_OBJECTS = ("controls", "tier", "guard", "guard_reliability", "calibration", "versions", "readout")


def _check_details(data: dict[str, Any], name: str) -> None:
    """Refuses entries of another kind than a search writes."""
    for key in ("name", "pair", "heads"):
        text = data.get(key)
        if text is not None and not (isinstance(text, str) and text.isprintable()):
            raise MaskError(f"mask '{name}': '{key}' must be plain text, but got {text!r}"[:300])
    for key in _OBJECTS:
        value = data.get(key)
        if value is not None and not isinstance(value, dict):
            raise MaskError(f"mask '{name}': '{key}' must be an object, but is a {type(value).__name__}")


def _stitches(reference: Any, name: str, folder: Path | None) -> Stitches | None:
    """Reads the stitches that a mask file names."""
    if reference is None:
        return None
    file, sha256 = (reference.get(k) if isinstance(reference, dict) else None for k in ("file", "sha256"))
    if not isinstance(file, str) or not isinstance(sha256, str) or not file or Path(file).name != file:
        raise MaskError(
            f"mask '{name}': 'stitches' must name a 'file' in the same folder and its 'sha256', but got {reference!r}"[
                :300
            ]
        )
    if folder is None:
        raise MaskError(f"mask '{name}' has stitches in the file {file}; load it from the folder where that lies")
    return Stitches.load(folder / file, sha256)


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _whole(text: str) -> int:
    _finite(text)  # what can't be a float can't be compared with one, or printed as one
    return int(text)


def _partial(sublayers: Any, keep: list[int], name: str) -> tuple[tuple[int, str], ...]:
    """Layers that run in part, from the file's two lists (a layer is kept where both halves are)."""
    if not sublayers:
        return ()
    lists: list[Any] = [sublayers.get(half) for half in PARTS] if isinstance(sublayers, dict) else [None]
    if any(
        not isinstance(flags, list)
        or len(flags) != len(keep)
        or any(f not in (0, 1) or isinstance(f, float) for f in flags)
        for flags in lists
    ):
        raise MaskError(f"mask '{name}': 'sublayers' must have 'attention' and 'mlp', each a 0 or 1 for every layer")
    attention, mlp = lists
    if [a & b for a, b in zip(attention, mlp, strict=True)] != keep:
        raise MaskError(f"mask '{name}': 'keep' must be 1 exactly where attention and mlp both are")
    return tuple((i, ATTENTION if a else MLP) for i, (a, b) in enumerate(zip(attention, mlp, strict=True)) if a != b)
