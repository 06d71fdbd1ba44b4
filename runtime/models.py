"""The options of every command that load a pair, and loading what they say.

Nothing here imports torch until something is loaded, so that ``--help`` and every contradiction are answered at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from viasd.errors import OptionError
from viasd.pairs import DEFAULT_PAIR, DEFAULT_TARGET, MODEL_FREE_DRAFTERS, TINY, parse_pair, parse_target, split_drafter

if TYPE_CHECKING:
    from viasd.pair import Pair

# Two options of which only one can be given, and why.
_EXCLUSIVE = (
    ("pair", "target", "a pair names both models"),
    ("pair", "drafter", "a pair names both models"),
    ("device", "device_map", "a device map places the model itself"),
    ("compile", "device_map", "a graph runs on one device"),
    ("base", "target", "base chooses among registered checkpoints"),
)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are `OptionError`."""

    def error(self, message: str) -> NoReturn:
        """See `argparse.ArgumentParser.error`."""
        raise OptionError(f"{message} (see {self.prog} --help)")


def add_model_options(parser: argparse.ArgumentParser) -> Any:
    """Adds the group of options that say which models to load and how; each is None when not given."""
    models = parser.add_argument_group("models")
    models.add_argument("--pair", metavar="NAME", help=f"FAMILY-DRAFTER:TARGET (default {DEFAULT_PAIR})")
    models.add_argument("--target", metavar="REF", help="hub id, folder, .gguf file or FAMILY:SIZE, instead of a pair")
    models.add_argument(
        "--drafter",
        metavar="REF",
        help="hub id, folder, .gguf file, file of viasd-fit drafter, lookup (default) or self; lookup+REF asks lookup first",
    )
    models.add_argument("--base", action="store_true", default=None, help="base checkpoints instead of instruct ones")
    models.add_argument("--weights", choices=("auto", "hub", "packaged"), help="where a pair's weights come from")
    models.add_argument("--device", help="auto (default), cpu, cuda, cuda:N or mps")
    models.add_argument("--drafter-device", metavar="DEVICE", help="of the drafter model (default: the target's)")
    models.add_argument("--device-map", metavar="MAP", help="spread the target over devices, e.g. auto")
    models.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of the weights")
    models.add_argument("--quantization", metavar="NAME", help="of the target: int8, int4 (CPU), or e.g. bnb-4bit")
    models.add_argument(
        "--layers",
        choices=("auto", "hf", "fused", "native"),
        help="decoder layers: transformers' own, written out, or by our CPU kernels (default: the fastest that fits)",
    )
    models.add_argument(
        "--compile", action="store_true", default=None, help="run passes of few tokens as compiled graphs (for GPUs)"
    )
    models.add_argument("--attn", choices=("auto", "sdpa", "eager"), help="attention kernel")
    models.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    return models


def given_options(args: argparse.Namespace) -> set[str]:
    """Names of the options that say something."""
    return {
        name for name, value in vars(args).items() if value is not None and (value != "auto" or name == "device_map")
    }


def check_exclusive(pairs: Iterable[tuple[str, str, str]], given: set[str]) -> None:
    """Refuses two options of which only one can be given.

    Args:
        pairs: (one, other, why).
        given: See `given_options`.

    Raises:
        OptionError: Naming both and the reason.
    """
    for first, second, why in pairs:
        if {first, second} <= given:
            raise OptionError(f"{option(first)} and {option(second)} contradict each other: {why}; leave one out")


def check_models(args: argparse.Namespace) -> str:
    """Checks what can be checked of the model options before anything is loaded.

    Returns:
        The drafter: ``lookup``, ``self``, a size, or a reference.

    Raises:
        OptionError: If options contradict each other.
        PairError: If the pair is not registered.
    """
    given = given_options(args)
    check_exclusive(_EXCLUSIVE, given)
    if args.compile and args.layers == "hf":
        raise OptionError("--compile and --layers hf contradict each other: only layers written out are compiled")
    if args.drafter is not None and args.target is None:
        raise OptionError("--drafter needs --target; or name both by --pair")
    if args.target is None:
        drafter = parse_pair(DEFAULT_PAIR if args.pair is None else args.pair, base=bool(args.base)).drafter
    else:
        drafter = args.drafter or "lookup"
        if "weights" in given and parse_target(args.target) is None:
            raise OptionError(
                f"--weights chooses where registered checkpoints come from, but --target {args.target} is none; leave it "
                f"out, or name one such as {DEFAULT_TARGET}"
            )
    first, drafter = split_drafter(drafter)
    if first and drafter == "lookup":
        raise OptionError("--drafter lookup+lookup is lookup alone; use --drafter lookup")
    if "drafter_device" in given and (drafter in (*MODEL_FREE_DRAFTERS, TINY) or drafter.endswith(".safetensors")):
        raise OptionError(
            f"--drafter-device places a drafter model, but the drafter is {drafter}, which is none of its own"
        )
    if args.threads is not None and args.threads < 1:
        raise OptionError(f"--threads must be at least 1, but got {args.threads}")
    return drafter


def load_models(args: argparse.Namespace, say: Callable[[str], None]) -> Pair:
    """Loads the pair that the options name.

    Args:
        args: Parsed options of `add_model_options`, and ``quiet``.
        say: Receives one-line notices.

    Raises:
        ViasdError: See `viasd.load.load_pair`.
    """
    import torch
    import transformers

    from viasd.hardware import quantization_config, resolve_device, resolve_dtype
    from viasd.load import load_pair
    from viasd.loading import LoadConfig
    from viasd.quantized import check_quantized

    config = LoadConfig(
        device=args.device or "auto",
        dtype=args.dtype or "auto",
        device_map=args.device_map,
        quantization=args.quantization,
        weights=args.weights or "auto",
        drafter_device=args.drafter_device,
        quiet=bool(args.quiet),
        layers=args.layers or "auto",
        compile=bool(args.compile),
    )
    # Faults of names, before gigabytes are fetched for them.
    device = resolve_device(config.device)
    resolve_device(config.drafter_device or "auto")
    if config.own_quantization is not None:
        check_quantized(config.own_quantization, config.layers, device)
    elif config.quantization is not None:
        quantization_config(config.quantization, resolve_dtype(config.dtype, device))
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    return load_pair(
        args.pair,
        drafter=args.drafter,
        target=args.target,
        base=bool(args.base),
        config=config,
        kernel=args.attn or "auto",
        say=say,
    )


def option(name: str) -> str:
    """An option as it is typed."""
    return "--" + name.replace("_", "-")
