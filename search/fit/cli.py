"""`viasd-fit`: train what a target lacks, from the command line. Nothing here imports torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Protocol

import viasd
from viasd.runtime.command import run_command
from viasd.runtime.models import Parser

PROG = "viasd-fit"

#: Subcommand -> (module, one sentence). A module is imported only when its command is asked for.
COMMANDS: dict[str, tuple[str, str]] = {
    "corpus": ("viasd.search.fit.corpus_command", "let a target write conversations, as a corpus to train on"),
    "drafter": ("viasd.search.fit.drafter", "train a small drafter for a target"),
    "heads": ("viasd.search.fit.heads", "train light heads that say early what a target will say"),
    "stitches": ("viasd.search.fit.stitches", "fit affine maps across the gaps of a mask, for its slim verifier alone"),
}


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's options; torch is not imported for that."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Does the work; returns the exit code."""
        ...


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: Arguments; None takes those of the process.

    Returns:
        Exit code: 0, 2 after an error (one line on standard error), 130 after Ctrl-C, 141 when the reader went away.
    """
    return run_command(
        PROG,
        lambda: _main(sys.argv[1:] if argv is None else argv),
        "interrupted; what was finished is kept, and the same command goes on",
    )


def _main(argv: list[str]) -> int:
    if argv and argv[0] in COMMANDS:
        module, sentence = COMMANDS[argv[0]]
        command: Command = importlib.import_module(module)
        parser = Parser(
            prog=f"{PROG} {argv[0]}",
            allow_abbrev=False,
            description=f"{sentence[0].upper()}{sentence[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(parser)
        return command.run(parser.parse_args(argv[1:]))
    listing = "\n".join(f"  {PROG} {name:10} {sentence}" for name, (_, sentence) in COMMANDS.items())
    parser = Parser(
        prog=PROG,
        allow_abbrev=False,
        description="Train small extras for a target.",
        epilog=f"commands:\n{listing}\n\n{PROG} COMMAND --help shows the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=list(COMMANDS), help="what to do")
    parser.add_argument("--version", action="version", version=f"{PROG} {viasd.__version__}")
    parser.parse_args(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
