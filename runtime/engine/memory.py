"""Memory for keys and values: what a request can need at most, and whether there is room for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from viasd.errors import CapacityError, OptionError
from viasd.hardware import free_memory
from viasd.kv import capacity
from viasd.layered import LayeredModel
from viasd.pair import Pair
from viasd.runtime.answer import Answer
from viasd.runtime.drafters import SelfDrafter
from viasd.runtime.packed import Line, through

_SHARE = 0.5  # of the memory that is free when the engine is made
_UNKNOWN = 4 << 30  # bytes, where nobody can say how much is free


@dataclass
class KVBudget:
    """Bytes set aside for keys and values, and how many of them are promised.

    Attributes:
        total: Bytes.
        reserved: Of these promised to requests that run.
    """

    total: int
    reserved: int = 0

    def __post_init__(self) -> None:
        if self.total < 1:
            raise OptionError(f"kv_budget must be at least 1 byte, but got {self.total}")

    @classmethod
    def of(cls, pair: Pair, total: int | None) -> KVBudget:
        """So many bytes, or by default half of what is free on the target's device."""
        if total is None:
            free = free_memory(pair.target.device)
            total = _UNKNOWN if free is None else max(1, int(free * _SHARE))
        return cls(total)

    def check(self, needed: int, positions: int) -> None:
        """Refuses what could never fit.

        Raises:
            CapacityError: With both numbers.
        """
        if needed > self.total:
            raise CapacityError(
                f"the request can need {_megabytes(needed)} for the keys and values of {positions} positions, but kv_budget "
                f"is {_megabytes(self.total)}; lower max_new_tokens, shorten the prompt, or raise kv_budget"
            )

    def reserve(self, needed: int) -> bool:
        """Promises memory if there is room."""
        if self.reserved + needed > self.total:
            return False
        self.reserved += needed
        return True

    def release(self, needed: int) -> None:
        """Takes a promise back."""
        self.reserved -= needed


def worst_positions(answer: Answer) -> int:
    """Positions that an answer's caches can hold at most: the whole of it and one block beyond."""
    return len(answer.prompt) + answer.room + answer.config.decoding.gamma + 1


def worst_bytes(answer: Answer) -> int:
    """Bytes that its caches can hold at most: buffers grow by doubling, one after the other."""
    pair, positions = answer.pair, worst_positions(answer)
    needed = _sequence_bytes(pair, "target", pair.target, positions)
    if answer.drafter is not None and pair.drafter is not None and not isinstance(answer.drafter, SelfDrafter):
        needed += _sequence_bytes(pair, "drafter", pair.drafter, positions)
    if pair.feature is not None and answer.drafter is not None:
        shape = pair.feature.file.shape
        # Keys and values, and the target's states until they are made use of.
        each = 2 * shape.depth * shape.kv_heads * shape.head_dim + shape.width
        needed += each * pair.target.dtype.itemsize * capacity(positions)
    return needed


def _sequence_bytes(pair: Pair, name: str, model: LayeredModel, positions: int) -> int:
    key = ("kv bytes", name)
    if key not in pair.measured:
        pair.measured[key] = bytes_per_position(model)
    each: int = pair.measured[key]
    held = capacity(positions)
    # While the last buffer of the last layer grows, the one before it is still there.
    return each * held + each * held // (4 * model.n_layers)


def bytes_per_position(model: LayeredModel) -> int:
    """Bytes of keys and values of one position in every layer, as this model stores them: one token is run to see."""
    kv = model.new_kv()
    with torch.inference_mode():
        through(model, None, [Line(kv, 0, [0])])
    return kv.nbytes() // capacity(1)


def _megabytes(n: int) -> str:
    return f"{n / 1e6:.1f} MB" if n < 1e9 else f"{n / 1e9:.2f} GB"
