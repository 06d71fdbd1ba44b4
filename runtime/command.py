"""What every command does: end with an exit code, say in one line what went wrong, refuse files it could not write."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from viasd.errors import OptionError, ViasdError
from viasd.runtime.display import clean

USAGE_ERROR, INTERRUPTED, BROKEN_PIPE = 2, 130, 141


def run_command(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Runs a command's body.

    Args:
        program: Name of the command, for its messages.
        body: Does the work and returns the exit code.
        interrupted: What to say after Ctrl-C.

    Returns:
        The body's exit code; 2 after a `ViasdError`, 130 after Ctrl-C, 141 when the reader of its output went away.
    """
    if sys.stdout is None:  # closed by whoever started this: nothing could be delivered
        complain(program, "error: standard output is closed; results would be lost")
        return USAGE_ERROR
    try:
        return body()
    except ViasdError as error:
        complain(program, f"error: {error}")
        return USAGE_ERROR
    except KeyboardInterrupt:
        complain(program, interrupted)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more at exit; there must be something to take it.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def complain(program: str, message: str) -> None:
    """One line on standard error, whatever the message holds."""
    print(f"{program}: {clean(' '.join(message.split()))}", file=sys.stderr)


def check_writable(name: str, value: str) -> None:
    """Refuses a file that can't be written, before the work whose result it is for.

    Raises:
        OptionError: Naming the option and the reason.
    """
    path = Path(value)
    try:
        unfit = not value or (path.exists() and not path.is_file())
    except OSError as error:  # such as a name that is too long
        raise OptionError(f"--{name}: can't use '{value[:60]}': {error.strerror or error}") from error
    if unfit:
        raise OptionError(f"--{name} must be a file, but got '{value}'")
    if not path.parent.is_dir():
        raise OptionError(f"--{name}: there is no folder '{path.parent}'; make it first")
    if not os.access(path.parent, os.W_OK):
        raise OptionError(f"--{name}: folder '{path.parent}' is not writable")


def is_file(name: str) -> bool:
    """Whether there is a file of that name, whatever the name may be."""
    try:
        return Path(name).is_file()
    except OSError:  # such as a name that is too long
        return False
