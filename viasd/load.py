"""`load_pair`: from a pair's name, or two references, to a `Pair` that is ready to decode."""

from __future__ import annotations

from collections.abc import Callable

from viasd.decoder import find_decoder
from viasd.errors import OptionError
from viasd.fuse import fuse
from viasd.kernels import build
from viasd.loading import LoadConfig, load_pair_models
from viasd.pair import Pair, make_pair
from viasd.pairs import DEFAULT_PAIR, parse_pair


def load_pair(
    pair: str | None = None,
    *,
    drafter: str | None = None,
    target: str | None = None,
    base: bool = False,
    config: LoadConfig | None = None,
    kernel: str = "auto",
    say: Callable[[str], None] = lambda line: None,
) -> Pair:
    """Loads a drafter and a target that share a tokenizer, and checks that both can be driven exactly.

    Args:
        pair: A registered name such as ``gemma2-2b:27b``; None takes the default pair, or `drafter` and `target`.
        drafter: Hub id, local folder or ``.gguf`` file, file of a feature drafter, ``lookup`` (the default) or ``self``;
            ``lookup+`` before it asks lookup first. Needs `target`.
        target: Hub id, local folder, ``.gguf`` file, or a registered ``FAMILY:SIZE``.
        base: Base checkpoints instead of instruct ones (registered pairs only).
        config: Device, dtype, weights and so on; None for all defaults.
        kernel: ``auto``, ``sdpa`` or ``eager`` attention.
        say: Receives one-line notices.

    Raises:
        OptionError: If both a pair and single references are given, or a drafter without a target.
        ViasdError: If anything can't be found, loaded, or used together.
    """
    config = config or LoadConfig()
    if pair is not None and (drafter is not None or target is not None):
        raise OptionError("give either a pair or drafter and target, but got both")
    if drafter is not None and target is None:
        raise OptionError("a drafter needs a target; add --target")
    wanted = (
        (drafter or "lookup", target)
        if target is not None
        else parse_pair(DEFAULT_PAIR if pair is None else pair, base=base)
    )
    loaded = load_pair_models(wanted, config, say)
    if config.layers in ("auto", "native") and loaded.device == "cpu" and (missing := build.why_missing(say)):
        say(f"passes of few tokens run through torch, which is slower: {missing}")
    if config.layers in ("auto", "native"):
        # These models are ours alone, so their weights may be laid together wherever they allow it.
        for model in (loaded.drafter, None if config.own_quantization else loaded.target):
            if model is not None:
                fuse(find_decoder(model).layers)
    return make_pair(
        loaded.target,
        loaded.target_tokenizer,
        drafter=loaded.feature or (loaded.drafter if loaded.drafter is not None else loaded.drafter_id),
        drafter_tokenizer=loaded.drafter_tokenizer,
        name=f"{wanted[0]} -> {wanted[1]}" if isinstance(wanted, tuple) else wanted.name,
        target_id=loaded.target_id,
        kernel=kernel,
        source=loaded.source,
        layers=config.layers,
        quantization=config.own_quantization,
        codes=loaded.codes,
        compile=config.compile,
        lookup_first=loaded.lookup_first,
        shortlist=loaded.shortlist,
    )
