"""The registry of drafter/target pairs: which checkpoints share a tokenizer, and their ids on the model hub."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from viasd.drafters import names
from viasd.errors import PairError

DEFAULT_PAIR = "smollm2-lookup:135m"
DEFAULT_TARGET = "smollm2:135m"

#: Drafters that need no second checkpoint: prompt lookup, and the target itself with more layers skipped.
MODEL_FREE_DRAFTERS = ("lookup", "self")
#: The drafter of a few layers that comes with the package for some targets.
TINY = "tiny"
#: Before any other drafter: look up first, and ask that one where there is nothing to be found.
LOOKUP_FIRST = "lookup+"

#: family -> size -> (instruct id, base id), sizes in ascending order; None where no such checkpoint was published.
#: All sizes of one family share a tokenizer.
CHECKPOINTS: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "gemma2": {size: (f"google/gemma-2-{size}-it", f"google/gemma-2-{size}") for size in ("2b", "9b", "27b")},
    "gemma3": {
        "270m": ("google/gemma-3-270m-it", "google/gemma-3-270m"),
        **{size: (f"google/gemma-3-{size}-it", f"google/gemma-3-{size}-pt") for size in ("1b", "4b", "12b", "27b")},
    },
    "llama2": {
        size: (f"meta-llama/Llama-2-{size}-chat-hf", f"meta-llama/Llama-2-{size}-hf") for size in ("7b", "13b", "70b")
    },
    "llama3": {
        "1b": ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        "3b": ("meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Llama-3.2-3B"),
        "8b": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        "70b": ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B"),
    },
    "qwen2.5": {
        size.lower(): (f"Qwen/Qwen2.5-{size}-Instruct", f"Qwen/Qwen2.5-{size}")
        for size in ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B")
    },
    "qwen3": {
        **{
            size.lower(): (f"Qwen/Qwen3-{size}", f"Qwen/Qwen3-{size}-Base")
            for size in ("0.6B", "1.7B", "4B", "8B", "14B")
        },
        "32b": ("Qwen/Qwen3-32B", None),
    },
    # The larger two use the same 32768-entry "v3" tokenizer as 7B v0.3; Nemo and later models do not.
    "mistral": {
        "7b": ("mistralai/Mistral-7B-Instruct-v0.3", "mistralai/Mistral-7B-v0.3"),
        "22b": ("mistralai/Mistral-Small-Instruct-2409", None),
        "123b": ("mistralai/Mistral-Large-Instruct-2407", None),
    },
    "smollm2": {
        size.lower(): (f"HuggingFaceTB/SmolLM2-{size}-Instruct", f"HuggingFaceTB/SmolLM2-{size}")
        for size in ("135M", "360M", "1.7B")
    },
}


@dataclass(frozen=True)
class PairSpec:
    """One drafter and one target that share a tokenizer.

    Attributes:
        name: Canonical ``FAMILY-DRAFTER:TARGET``.
        family: Key of `CHECKPOINTS`.
        drafter: ``"lookup"``, ``"self"``, ``"tiny"`` or a size of the family.
        target: A size of the family.
        drafter_ref: Hub id of the drafter, None for ``"lookup"``, ``"self"`` and ``"tiny"``.
        target_ref: Hub id of the target.
        base: True for base (pretrained only) checkpoints, False for instruct ones.
        lookup_first: Whether lookup is asked before the drafter.
    """

    name: str
    family: str
    drafter: str
    target: str
    drafter_ref: str | None
    target_ref: str
    base: bool
    lookup_first: bool = False


def parse_pair(name: str, *, base: bool = False) -> PairSpec:
    """Look up ``FAMILY-DRAFTER:TARGET``, ignoring case and surrounding blanks.

    Args:
        name: For example ``"gemma2-2b:27b"``, ``"qwen2.5-lookup:7b"``, ``"smollm2-self:135m"``; ``lookup+`` before any other
            drafter than lookup asks lookup first.
        base: Take base checkpoints instead of instruct ones.

    Raises:
        PairError: If the name has another form, or names no registered pair; the message lists the nearest names.
    """
    wanted = name.strip().lower()
    known = {spec.name: spec for spec in list_pairs(base)}
    if wanted in known:
        return known[wanted]
    family, dash, rest = wanted.partition(f"-{LOOKUP_FIRST}")
    behind = known.get(f"{family}-{rest}") if dash else None
    if behind is not None and behind.drafter != "lookup":
        return replace(behind, name=wanted, lookup_first=True)
    raise PairError(_why_unknown(wanted, base, list(known)))


def parse_target(name: str) -> PairSpec | None:
    """The registered target that ``FAMILY:SIZE`` names, as a pair without a drafter model; None for any other reference."""
    family, colon, size = name.strip().lower().partition(":")
    if not colon or size not in CHECKPOINTS.get(family, {}) or _reference(family, size, False) is None:
        return None
    return _spec(family, "lookup", size, False)


def split_drafter(drafter: str) -> tuple[bool, str]:
    """Whether lookup is to be asked first, and the drafter that is asked then."""
    return drafter.startswith(LOOKUP_FIRST), drafter.removeprefix(LOOKUP_FIRST)


def list_pairs(base: bool = False) -> list[PairSpec]:
    """All pairs, family by family: for each target `lookup`, `self`, `tiny` where the package has one, and smaller sizes."""
    return [
        _spec(family, drafter, target, base)
        for family, sizes in CHECKPOINTS.items()
        for position, target in enumerate(sizes)
        for drafter in (*MODEL_FREE_DRAFTERS, *_tiny(family, target, base), *list(sizes)[:position])
        if _reference(family, target, base)
        and (drafter in (*MODEL_FREE_DRAFTERS, TINY) or _reference(family, drafter, base))
    ]


def _tiny(family: str, target: str, base: bool) -> tuple[str, ...]:
    return (TINY,) if not base and f"{family}:{target}" in names() else ()


def _reference(family: str, size: str, base: bool) -> str | None:
    return CHECKPOINTS[family][size][1 if base else 0]


def _spec(family: str, drafter: str, target: str, base: bool) -> PairSpec:
    target_ref = _reference(family, target, base)
    assert target_ref is not None  # list_pairs keeps only published targets
    return PairSpec(
        name=f"{family}-{drafter}:{target}",
        family=family,
        drafter=drafter,
        target=target,
        drafter_ref=None if drafter in (*MODEL_FREE_DRAFTERS, TINY) else _reference(family, drafter, base),
        target_ref=target_ref,
        base=base,
    )


def _why_unknown(wanted: str, base: bool, known: list[str]) -> str:
    """Say what is wrong with the first part of the name that is wrong, then the nearest names."""
    left, colon, target = wanted.partition(":")
    family, dash, drafter = left.rpartition("-")
    if not (colon and dash and family and drafter and target):
        reason = f"a pair must be FAMILY-DRAFTER:TARGET, but got {wanted!r}"
    elif family not in CHECKPOINTS:
        reason = f"unknown family {family!r} in pair {wanted!r} (known: {', '.join(CHECKPOINTS)})"
    else:
        sizes = list(CHECKPOINTS[family])
        drafter = split_drafter(drafter)[1]
        unknown = [s for s in (drafter, target) if s not in sizes and not (s == drafter and s in MODEL_FREE_DRAFTERS)]
        if unknown:
            reason = f"unknown size {unknown[0]!r} in pair {wanted!r} ({family} has {', '.join(sizes)})"
        elif drafter in sizes and sizes.index(drafter) >= sizes.index(target):
            reason = f"the drafter must be smaller than the target, but got {wanted!r}"
        else:
            reason = f"{family} publishes no {'base' if base else 'instruct'} checkpoints for pair {wanted!r}"
    nearest = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3)
    hint = f"nearest: {', '.join(nearest)}; " if nearest else ""
    return f"{reason}; {hint}--list-pairs shows all"
