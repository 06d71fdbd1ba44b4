"""Which token ids two models may exchange: drafter and target must map the same strings to the same ids."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from viasd.errors import TokenizerMismatchError


def vocabulary_size(tokenizer: Any, rows: int) -> int:
    """Number of leading logit rows of one model that may be emitted.

    Args:
        tokenizer: A transformers tokenizer.
        rows: Rows of the model's head; often padded beyond the tokenizer (Qwen2.5 7B has 152064 for 151665 strings).

    Returns:
        The highest id with a string, plus one, but never more than `rows`.

    Raises:
        TokenizerMismatchError: If the tokenizer knows no token at all.
    """
    ids = tokenizer.get_vocab().values()
    if not ids:
        raise TokenizerMismatchError("the tokenizer has an empty vocabulary; check the checkpoint's tokenizer files")
    return min(rows, max(ids) + 1)


def fingerprint(tokenizer: Any) -> str:
    """Hash of what each token id stands for."""
    entries = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]


def common_vocabulary(drafter_tokenizer: Any, target_tokenizer: Any, drafter_rows: int, target_rows: int) -> int:
    """Number of leading logit rows that mean the same to drafter and target.

    The maps are compared, not their sizes. Ids that only one of them has, above everything both have (padding rows,
    tokens added at the end), are cut off; below that every id must carry the same string on both sides.

    Args:
        drafter_tokenizer: A transformers tokenizer.
        target_tokenizer: A transformers tokenizer.
        drafter_rows: Rows of the drafter's head.
        target_rows: Rows of the target's head.

    Returns:
        At most the highest id that both tokenizers know, plus one, and at most the smaller number of rows.

    Raises:
        TokenizerMismatchError: If an id below the result has different strings (the lowest such id is named), or if
            the target's end-of-sequence token would be cut off.
    """
    drafter, target = drafter_tokenizer.get_vocab(), target_tokenizer.get_vocab()
    limit = min(vocabulary_size(drafter_tokenizer, drafter_rows), vocabulary_size(target_tokenizer, target_rows))
    if drafter != target:
        # Pairs (id, string) of exactly one side, below the common prefix: the lowest id is where the two part.
        differing = [token_id for string, token_id in drafter.items() ^ target.items() if token_id < limit]
        if differing:
            raise TokenizerMismatchError(_difference(min(differing), drafter, target))
    end = target_tokenizer.eos_token_id
    if end is not None and end >= limit:
        raise TokenizerMismatchError(
            f"the target ends its text with {target_tokenizer.eos_token!r} (id {end}), which the drafter does not "
            f"have (the two share ids 0..{limit - 1}); choose a drafter of the target's own family and kind"
        )
    return limit


def _difference(token_id: int, drafter: dict[str, int], target: dict[str, int]) -> str:
    sides = []
    for name, own, other_name, other in (
        ("drafter", drafter, "target", target),
        ("target", target, "drafter", drafter),
    ):
        strings = [string for string, i in own.items() if i == token_id]
        if not strings:
            sides.append(f"the {name} has none")
            continue
        where = other.get(strings[0])
        elsewhere = f"id {where} in the {other_name}" if where is not None else f"unknown to the {other_name}"
        sides.append(f"the {name} has {strings[0]!r} ({elsewhere})")
    return (
        f"drafter and target must share a tokenizer, but they differ first at id {token_id}: {sides[0]}, {sides[1]}; "
        "choose a drafter of the target's own family, or --drafter lookup"
    )
