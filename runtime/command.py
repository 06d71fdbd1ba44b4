"""How every command ends: its exit code, and one line on standard error where something went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from viasd.errors import ViasdError
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
