"""`viasd-run`: generate through drafter, slim verifier and full verifier, from the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from viasd.errors import OptionError
from viasd.pairs import DEFAULT_PAIR, list_pairs, parse_pair
from viasd.runtime.command import INTERRUPTED, complain, run_command
from viasd.runtime.display import Screen, play, print_json, show_pairs
from viasd.runtime.models import load_models
from viasd.runtime.names import EXITING, MASKED
from viasd.runtime.options import PAPER_MEANS, PROG, options_from_args, parse_args
from viasd.runtime.promptfile import read_prompts

if TYPE_CHECKING:
    from viasd.pair import Pair
    from viasd.runtime.config import GenerationConfig


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error (one line on standard error), 130 after Ctrl-C, 141 when the reader went away.
    """
    return run_command(PROG, lambda: _main(argv))


def _main(argv: list[str] | None) -> int:
    args = parse_args(argv)
    screen = Screen(quiet=bool(args.quiet), color=not args.no_color)
    if args.list_pairs:
        pairs = list_pairs(bool(args.base))
        if args.json:
            print_json([asdict(pair) for pair in pairs], screen)
        else:
            show_pairs(pairs, screen)
        return 0
    lines = None if args.prompts is None else read_prompts(args.prompts)
    prompt = None if lines is not None else _read_prompt(args)
    # Whatever libraries print while they load must not end up between the answer and its reader.
    with contextlib.redirect_stdout(sys.stderr):
        config = _make_config(args)
        if args.preset == "paper":
            screen.note(PAPER_MEANS)
        pair = load_models(args, screen.note)
    with contextlib.nullcontext() if args.readout_log is None else _log_shown(screen):
        if lines is not None:
            from viasd.runtime.manyprompts import run_prompts

            return run_prompts(pair, lines, args, screen)
        if prompt is None:
            return _chat(pair, args, screen)
        return _answer(pair, prompt, config, args, screen)


@contextlib.contextmanager
def _log_shown(screen: Screen) -> Iterator[None]:
    """Lets the readouts' log through to standard error, as long as the command runs."""
    from viasd.runtime.readouts import LOG

    class ToScreen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            screen.say(record.getMessage(), style="dim")

    handler, level, propagate = ToScreen(), LOG.level, LOG.propagate
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)
        LOG.propagate = propagate


def _read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt of one-shot mode; None asks for a chat."""
    if args.prompt is not None:
        prompt: str = args.prompt
        return prompt
    if args.prompt_file is None and sys.stdin is not None and sys.stdin.isatty():
        if args.json:
            raise OptionError("--json answers one prompt; add --prompt or --prompt-file, or pipe one in")
        if args.check:
            raise OptionError("--check looks at one answer; add --prompt or --prompt-file, or pipe one in")
        return None
    from_stdin = args.prompt_file in (None, "-")
    source = "standard input" if from_stdin else f"'{args.prompt_file}'"
    try:
        if from_stdin:
            data = b"" if sys.stdin is None else sys.stdin.buffer.read()
        else:
            data = Path(args.prompt_file).read_bytes()
        text = data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise OptionError(f"can't read the prompt from {source}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"the prompt in {source} is not UTF-8 text (byte {error.start})") from error
    if not text:
        raise OptionError(f"the prompt from {source} is empty; give at least one character")
    return text


def _make_config(args: argparse.Namespace) -> GenerationConfig:
    """The configuration, and every complaint about it that needs no model."""
    from viasd.runtime.api import make_config
    from viasd.runtime.config import plan
    from viasd.shipped import find_mask, resolve_heads, shipped_mask

    config = make_config(options_from_args(args))
    spec = args.mask or "auto"
    has_mask = spec != "none"
    if spec == "auto":
        name = _pair_name(args)
        has_mask = name is not None and shipped_mask(name) is not None
    elif has_mask and not spec.startswith(("even:", "prefix:")):
        find_mask(spec)
    plan(config.decoding, has_mask=has_mask)
    if args.heads is not None or args.strategy in EXITING or spec.startswith("prefix:"):
        resolve_heads(args.heads or "auto", _pair_name(args))
    return config


def _pair_name(args: argparse.Namespace) -> str | None:
    """Name of the pair that was asked for, None for a target of no pair."""
    if args.target:
        return None
    return parse_pair(DEFAULT_PAIR if args.pair is None else args.pair, base=bool(args.base)).name


def _answer(pair: Pair, prompt: str, config: GenerationConfig, args: argparse.Namespace, screen: Screen) -> int:
    """One-shot mode."""
    from viasd.runtime.prompting import start, wants_chat

    heads = args.heads or "auto"
    mask = args.mask or "auto"
    if wants_chat(pair, args.chat, args.system, base=bool(args.base)):
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        answer = start(pair, [*system, {"role": "user", "content": prompt}], mask=mask, heads=heads, config=config)
    else:
        answer = start(pair, prompt, mask=mask, heads=heads, config=config)
    result = play(answer, screen, show=not args.json)
    if result is None:
        raise KeyboardInterrupt
    report = result.as_json()
    comparison = None
    if args.check and result.token_ids:
        from viasd.runtime.check import compare_with_plain

        comparison = compare_with_plain(pair, answer.session.prompt, result, config.sampling)
        report["check"] = comparison.as_json()
    if args.json:
        print_json(report, screen)
    screen.status(result)
    if comparison is not None:
        screen.note(comparison.sentence())
    if result.finish_reason == "interrupted":
        complain(PROG, "interrupted")
        return INTERRUPTED
    return 0


def _chat(pair: Pair, args: argparse.Namespace, screen: Screen) -> int:
    """Interactive mode."""
    from viasd.runtime.chat import Chat, history
    from viasd.runtime.prompting import wants_chat
    from viasd.shipped import resolve_mask

    # A mask was not asked for where the strategy has no use for one (that would have been refused).
    unmasked = args.strategy is not None and args.strategy not in MASKED
    chat = Chat(
        pair,
        options_from_args(args),
        None if unmasked else resolve_mask(args.mask or "auto", pair.target.n_layers, pair.name),
        screen,
        templated=wants_chat(pair, args.chat, args.system, base=bool(args.base)),
        system=args.system,
        heads=args.heads or "auto",
    )
    with history(screen):
        chat.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
