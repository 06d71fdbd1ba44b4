"""`viasd-search export`: the slim verifier of a mask as a checkpoint of its own."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import viasd
from viasd.errors import OptionError
from viasd.files import folder_atomically
from viasd.pairs import MODEL_FREE_DRAFTERS, parse_pair
from viasd.runtime.command import check_writable
from viasd.runtime.display import Screen, print_json
from viasd.runtime.models import Parser, check_exclusive, given_options
from viasd.runtime.readouts import scored_with

if TYPE_CHECKING:
    from viasd.heads import LightHeads
    from viasd.loading import LoadedPair
    from viasd.mask import LayerMask
    from viasd.slimmed import Slimmed

PROVENANCE = "viasd-slim.json"
_SCHEMA = 1
_EXCLUSIVE = (
    ("pair", "target", "a pair names the target"),
    ("base", "target", "base chooses among registered checkpoints"),
    ("weights", "target", "weights chooses where registered checkpoints come from"),
)
_EPILOG = """\
The folder loads in transformers as it is, as any tool's small draft model for the target. It keeps no cache in common with
the target, as viasd's own slim verifier does. Stitches can't be written into weights: they need the length of the residual
stream, and every layer reads it normed."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command. Nothing here imports torch."""
    parser = Parser(
        prog="viasd-search export",
        allow_abbrev=False,
        description="Write the slim verifier of a mask as a checkpoint of its own (config, weights, tokenizer).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "mask", metavar="MASK", help="mask file, the name of a shipped one, even:RATIO, or prefix:E (with --heads)"
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="the folder to make; it must not be there yet")
    parser.add_argument("--pair", metavar="NAME", help="FAMILY-DRAFTER:TARGET (default: the mask's own)")
    parser.add_argument("--target", metavar="REF", help="hub id, local folder or .gguf file, instead of a pair")
    parser.add_argument(
        "--base", action="store_true", default=None, help="a base checkpoint instead of an instruct one"
    )
    parser.add_argument("--weights", choices=("auto", "hub", "packaged"), help="where a pair's weights come from")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights written (default bfloat16)"
    )
    parser.add_argument("--heads", metavar="SPEC", help="light heads, for a mask that ends in one: a file, or lens:E")
    parser.add_argument(
        "--without-stitches", action="store_true", default=None, help="leave out the stitches that the mask has"
    )
    parser.add_argument("--json", action="store_true", default=None, help="one JSON object on standard output")
    parser.add_argument("--quiet", action="store_true", default=None, help="no notes")
    return parser


def run(argv: list[str]) -> int:
    """Exports.

    Args:
        argv: Arguments after ``export``.

    Raises:
        ViasdError: If anything can't be done; nothing is written then.
    """
    args = build_parser().parse_args(argv)
    check_exclusive(_EXCLUSIVE, given_options(args))
    output = Path(args.output)
    check_new(output)
    if args.pair is not None:
        parse_pair(args.pair, base=bool(args.base))
    screen = Screen(quiet=bool(args.quiet), color=False)
    # Whatever libraries print must not end up in the output.
    with contextlib.redirect_stdout(sys.stderr):
        from safetensors import SafetensorError

        from viasd.shipped import find_mask
        from viasd.slimmed import check_expressible, slimmed

        made_here = args.mask.startswith(("even:", "prefix:"))
        mask = None if made_here else find_mask(args.mask)
        if mask is not None and not args.without_stitches:
            check_expressible(mask)
        loaded = _load(args, None if mask is None else mask.pair, screen)
        mask, heads = _fitting(args, mask, loaded, screen)
        from viasd.vocab import vocabulary_size

        rows = loaded.target.get_output_embeddings().weight.shape[0]
        slim = slimmed(loaded.target, mask, vocabulary_size(loaded.target_tokenizer, rows), heads)
        said = _provenance(mask, heads, loaded, slim)
        if (scored := scored_with(mask)) is not None:
            screen.note(
                f"mask '{mask.name}' was scored with {scored.describe()}, but a checkpoint reads out its last layer: it "
                "will not say what viasd's own slim verifier says, and the mask's figures may not hold"
            )
        with folder_atomically(output, OptionError) as folder:
            try:
                slim.model.save_pretrained(folder)
            except SafetensorError as failure:  # such as a disk that is full
                raise OptionError(f"can't write {output}: {failure}") from failure
            loaded.target_tokenizer.save_pretrained(folder)
            (folder / PROVENANCE).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
            size = sum(path.stat().st_size for path in folder.iterdir())
    if args.json:
        print_json({"output": str(output), "bytes": size, **said}, screen)
        return 0
    for line in report(output, size, slim, len(mask.keep), said):
        print(line)
    return 0


def check_new(output: Path) -> None:
    """Refuses a folder that is there already, or could not be made, before anything is loaded.

    Raises:
        OptionError: Naming the reason.
    """
    if output.exists():
        raise OptionError(f"--output: '{output}' is there already; name a new folder, or remove it first")
    check_writable("output", str(output))


def report(output: Path, size: int, slim: Slimmed, n_layers: int, said: dict[str, Any]) -> list[str]:
    """What was written and what it is good for."""
    lines = [
        f"{output}: {len(slim.layers)} of {n_layers} layers of {said['target']['id']}, {size / 1e6:.1f} MB "
        f"({said['dtype']})",
        "next, beside that target:",
        f"  transformers: model.generate(..., assistant_model=AutoModelForCausalLM.from_pretrained({str(output)!r}))",
        f"  vLLM: {output} as the draft model of --speculative-config",
        f"  llama.cpp: convert_hf_to_gguf.py {output}, and the result as --model-draft",
    ]
    if not slim.regular:
        lines.append(
            "its layers of sliding and of full attention come in another order than the family's; a tool that does not read "
            f"layer_types from the config (llama.cpp, by what we know) is wrong beyond {slim.window} tokens"
        )
    return lines


def _load(args: argparse.Namespace, pair: str | None, screen: Screen) -> LoadedPair:
    """The target, on the CPU, its weights in the dtype to be written."""
    import transformers

    from viasd.loading import LoadConfig, load_pair_models

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = LoadConfig(
        device="cpu", dtype=args.dtype or "bfloat16", weights=args.weights or "auto", quiet=bool(args.quiet)
    )
    if args.target is not None:
        return load_pair_models(("lookup", args.target), config, screen.note)
    name = args.pair or pair
    if name is None:
        raise OptionError("the mask names no pair; add --pair NAME or --target REF, the model that it is for")
    spec = parse_pair(name, base=bool(args.base))
    # The drafter is none of this command's business.
    return load_pair_models(replace(spec, drafter=MODEL_FREE_DRAFTERS[0], drafter_ref=None), config, screen.note)


def _fitting(
    args: argparse.Namespace, mask: LayerMask | None, loaded: LoadedPair, screen: Screen
) -> tuple[LayerMask, LightHeads | None]:
    """The mask and its light heads, checked against the target."""
    from viasd.heads import LightHeads
    from viasd.layered import LayeredModel
    from viasd.shipped import resolve_heads, resolve_mask

    model = LayeredModel(loaded.target, layers="hf")
    if mask is None:
        mask = resolve_mask(args.mask, model.n_layers, None)
        assert mask is not None
    if args.without_stitches:
        if mask.stitches is None:
            raise OptionError(f"--without-stitches: mask '{mask.name}' has none; leave the option out")
        mask = replace(mask, stitches=None)
    heads = resolve_heads(args.heads, None) if args.heads is not None else None
    if heads is None and mask.heads is not None:
        heads = LightHeads.load(mask.heads)
    if heads is not None and mask.prefix is None:
        raise OptionError(f"--heads: mask '{mask.name}' does not end in a light head; leave the option out")
    # Halves of layers are written out for every family, also where viasd itself does not run them.
    for warning in (
        replace(mask, partial=()).check(model, loaded.target_id),
        heads and heads.check(model, loaded.target_id),
    ):
        if warning:
            screen.note(warning)
    return mask, heads


def _provenance(mask: LayerMask, heads: LightHeads | None, loaded: LoadedPair, slim: Slimmed) -> dict[str, Any]:
    """Where an exported model came from."""
    from dataclasses import asdict

    import transformers

    from viasd.identity import ModelIdentity
    from viasd.layered import LayeredModel

    return {
        "schema": _SCHEMA,
        "viasd": viasd.__version__,
        "transformers": transformers.__version__,
        "target": asdict(ModelIdentity.of(LayeredModel(loaded.target, layers="hf"), loaded.target_id)),
        "source": loaded.source,
        "dtype": loaded.dtype,
        "layers": list(slim.layers),
        "heads": None if heads is None else {"name": heads.name, "digest": heads.digest},
        # None is the last layer's, which is all that a checkpoint has.
        "scored_with": None if (scored := scored_with(mask)) is None else scored.as_json(),
        "mask": mask.to_json(),
    }
