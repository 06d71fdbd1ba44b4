"""What a confident readout changes on a model, and what it costs: ``python -m viasd.runtime.bench.confident``.

``likelihood`` runs the target along reference answers and compares, token by token, the rows that a readout chooses with
the last layer's own: how many are moved, whether the best token is another, how likely the reference is, how often it is
the best token. Nothing of it depends on how busy the machine is. ``overhead`` decodes with and without, interleaved. One
JSON object a section on standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from viasd.attention import Segment
from viasd.confident import METHODS, ConfidentConfig
from viasd.errors import OptionError
from viasd.load import load_pair
from viasd.loading import LoadConfig
from viasd.pair import Pair
from viasd.runtime.api import generate
from viasd.runtime.bench.timing import interleaved, spread
from viasd.runtime.command import run_command
from viasd.selecting import ConfidentReadout

SECTIONS = ("likelihood", "overhead")
_ROWS = 16  # positions read out at a time: with a candidate each they are what the kernels take in one call


@dataclass(frozen=True)
class Worked:
    """A question with its reference answer, as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass
class Tally:
    """Sums of one readout over all answers.

    Attributes:
        answers: Per answer: tokens, summed log-likelihood of the reference by the chosen rows, and by the last layer's.
        moved: Tokens not read out from the last layer.
        depth: Layers between where they were read out and the last one, summed.
        deepest: The most of these.
        changed: Tokens whose best token is another than the last layer's.
        right: Tokens where the chosen row's best token is the reference.
        right_last: The same of the last layer.
        gained: Difference of the log-likelihoods, summed over moved tokens.
        read: Rows that went through the head.
    """

    answers: list[tuple[int, float, float]] = field(default_factory=list)
    moved: int = 0
    depth: int = 0
    deepest: int = 0
    changed: int = 0
    right: int = 0
    right_last: int = 0
    gained: float = 0.0
    read: int = 0

    def as_json(self) -> dict[str, Any]:
        """Means, and the standard error of the gain with answers as clusters: tokens of one are not independent."""
        tokens = sum(n for n, _, _ in self.answers)
        chosen, last = (sum(a[i] for a in self.answers) / tokens for i in (1, 2))
        gain = chosen - last
        spare = [c - own - n * gain for n, c, own in self.answers]
        error = math.sqrt(sum(x * x for x in spare)) / tokens if len(self.answers) > 1 else math.nan
        return {
            "tokens": tokens,
            "moved": self.moved / tokens,
            "mean_depth": self.depth / tokens,
            "deepest": self.deepest,
            "best_token_changed": self.changed / tokens,
            "log_likelihood": chosen,
            "log_likelihood_last_layer": last,
            "gain": gain,
            "gain_error": None if math.isnan(error) else error,
            "gain_of_moved": self.gained / self.moved if self.moved else None,
            "reference_is_best": self.right / tokens,
            "reference_is_best_last_layer": self.right_last / tokens,
            "rows_read_per_row": self.read / tokens,
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chosen sections.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_args(argv)
    return run_command("confident", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    configs = {
        method: ConfidentConfig(
            method,
            max_backtrack_layers=args.backtrack_layers,
            backtrack_ratio=args.backtrack_ratio or 0.0,
            reference_compat=args.readout_compat,
        )
        for method in args.readout or ["trough"]
    }
    sections = args.section or [s for s in SECTIONS if s != "likelihood" or args.dataset]
    if "likelihood" in sections and not args.dataset:
        raise OptionError("section likelihood needs --dataset FILE (JSON lines with 'question' and 'answer')")
    texts = [] if args.dataset is None else read_answers(args.dataset, args.limit)
    if args.threads is not None:
        if args.threads < 1:
            raise OptionError(f"--threads must be at least 1, but got {args.threads}")
        torch.set_num_threads(args.threads)
    config = LoadConfig(weights=args.weights, dtype=args.dtype, device=args.device)
    pair = load_pair(args.pair, config=config, say=lambda line: print(line, file=sys.stderr))
    worked = [_encoded(pair, question, answer) for question, answer in texts]
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "likelihood": lambda: likelihood(pair, worked, configs),
        "overhead": lambda: overhead(pair, configs, args.repeats, args.tokens),
    }
    for name in sections:
        about = {"section": name, "pair": pair.name, "dtype": pair.dtype, "threads": torch.get_num_threads()}
        print(json.dumps({**about, **run[name]()}), flush=True)
    return 0


def likelihood(pair: Pair, worked: Sequence[Worked], configs: dict[str, ConfidentConfig]) -> dict[str, Any]:
    """Every readout along every answer that fits into the context.

    Args:
        pair: Its target is asked.
        worked: Questions with answers.
        configs: Readouts by name.

    Raises:
        OptionError: If no answer fits, or a readout's window does not fit the model.
    """
    model = pair.target
    everything = range(model.n_layers)
    readouts = {name: ConfidentReadout(model, config, everything) for name, config in configs.items()}
    capture = sorted({layer for readout in readouts.values() for layer in readout.capture})
    tallies = {name: Tally() for name in readouts}
    fitting = [w for w in worked if w.answer and len(w.prompt) + len(w.answer) <= model.context_length]
    if not fitting:
        raise OptionError(f"none of {len(worked)} answers fits into a context of {model.context_length} tokens")
    with torch.inference_mode():
        for done, item in enumerate(fitting, start=1):
            tokens = [*item.prompt, *item.answer]
            step = model.step([Segment(model.new_kv(), 0, len(tokens) - 1)])
            last, captured = model.run(model.embed(tokens[:-1]), everything, step, capture)
            first = len(item.prompt) - 1
            states = {layer: hidden[:, first:] for layer, hidden in captured.items()}
            _along(readouts, tallies, last[:, first:], states, item.answer, model.readout)
            if sys.stderr.isatty():
                print(f"\r{done} of {len(fitting)} answers", end="", file=sys.stderr, flush=True)
    return {
        "answers": len(fitting),
        "too_long": len(worked) - len(fitting),
        "layers": model.n_layers,
        "readouts": {name: {"is": configs[name].describe(), **tally.as_json()} for name, tally in tallies.items()},
    }


def _along(
    readouts: dict[str, ConfidentReadout],
    tallies: dict[str, Tally],
    last: Tensor,
    captured: dict[int, Tensor],
    answer: Sequence[int],
    own: Callable[[Tensor], Tensor],
) -> None:
    """One answer: hidden states ``[1, n, d]`` at the n positions that predict its tokens."""
    sums = {name: [0.0, 0.0] for name in readouts}
    for start in range(0, len(answer), _ROWS):
        part = slice(start, start + _ROWS)
        wanted = torch.tensor(answer[part], device=last.device)
        plain = own(last[:, part])
        of_last, best = _log_likelihoods(plain, wanted), plain.argmax(dim=-1)
        for name, readout in readouts.items():
            chosen = readout(last[:, part], {i: captured[i][:, part] for i in readout.capture}, start)
            tally, found = tallies[name], chosen.logits.argmax(dim=-1)
            of_chosen = _log_likelihoods(chosen.logits, wanted)
            moved = torch.tensor(chosen.depths, device=last.device) > 0
            tally.moved += int(moved.sum())
            tally.depth += sum(chosen.depths)
            tally.deepest = max(tally.deepest, *chosen.depths)
            tally.changed += int((found != best).sum())
            tally.right += int((found == wanted).sum())
            tally.right_last += int((best == wanted).sum())
            tally.gained += float((of_chosen - of_last)[moved].sum())
            tally.read += chosen.read
            sums[name][0] += float(of_chosen.sum())
            sums[name][1] += float(of_last.sum())
    for name, (chosen_sum, last_sum) in sums.items():
        tallies[name].answers.append((len(answer), chosen_sum, last_sum))


def _log_likelihoods(logits: Tensor, wanted: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None])[:, 0].double()


def overhead(pair: Pair, configs: dict[str, ConfidentConfig], repeats: int, tokens: int) -> dict[str, Any]:
    """Tokens per second of plain decoding with and without readouts, interleaved, and the ratio of their medians."""
    question = "Describe how a bicycle stays upright while it moves."
    ids = pair.encode([{"role": "user", "content": question}] if pair.is_chat else question)

    def decode(config: ConfidentConfig | None) -> None:
        chosen: dict[str, Any] = {}
        if config is not None:
            window = {"backtrack_layers": config.backtrack_layers, "backtrack_ratio": config.backtrack_ratio}
            chosen = {"readout": config.method, **window, "readout_compat": config.reference_compat}
        generate(pair, ids, mask=None, strategy="plain", max_new_tokens=tokens, ignore_eos=True, **chosen)

    jobs: dict[str, Callable[[], object]] = {"last layer": lambda: decode(None)}
    jobs |= {name: lambda config=config: decode(config) for name, config in configs.items()}  # type: ignore[misc]
    times = interleaved(jobs, repeats)
    return {
        "tokens_per_second": {name: spread([tokens / t for t in taken]) for name, taken in times.items()},
        "times_slower": {name: round(median(times[name]) / median(times["last layer"]), 3) for name in configs},
        "repeats": repeats,
        "note": f"medians of {repeats}, {tokens} tokens after a prompt of {len(ids)}, prefill included",
    }


def read_answers(path: str, limit: int | None) -> list[tuple[str, str]]:
    """Questions and reference answers, the first `limit` of them.

    Raises:
        OptionError: If the file can't be read, is empty, or a line is something else, naming it.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise OptionError(f"can't read data set '{path}': {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"data set '{path}' is not UTF-8 text (byte {error.start})") from error
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            question, answer = entry["question"], entry["answer"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise OptionError(
                f"data set '{path}', line {number}: expected an object with 'question' and 'answer' ({error!r})"
            ) from error
        if not isinstance(question, str) or not isinstance(answer, str) or not question or not answer:
            raise OptionError(f"data set '{path}', line {number}: 'question' and 'answer' must hold some text")
        found.append((question, answer))
    if not found:
        raise OptionError(f"data set '{path}' has no questions; give one JSON object a line")
    return found[:limit]


def _encoded(pair: Pair, question: str, answer: str) -> Worked:
    """As a chat where there is a template, else the answer after an empty line."""
    prompt = pair.encode([{"role": "user", "content": question}] if pair.is_chat else f"{question}\n\n")
    ids = pair.tokenizer(answer, add_special_tokens=False)["input_ids"]
    return Worked(tuple(prompt), tuple(int(i) for i in ids))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m viasd.runtime.bench.confident", description=__doc__)
    parser.add_argument("--pair", default="smollm2-lookup:135m")
    parser.add_argument("--weights", default="auto", choices=("auto", "hub", "packaged"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--readout", action="append", choices=METHODS, help="may be repeated (default trough)")
    parser.add_argument(
        "--backtrack-layers", type=int, metavar="N", help="most layers to step back (default 10; -1: any)"
    )
    parser.add_argument("--backtrack-ratio", type=float, metavar="X", help="the same as a share of the layers")
    parser.add_argument("--readout-compat", action="store_true", help="windows as the authors' code counts them")
    parser.add_argument("--dataset", metavar="FILE", help="JSON lines with 'question' and 'answer', as in GSM8K")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N questions (default all)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    return parser


if __name__ == "__main__":
    sys.exit(main())
