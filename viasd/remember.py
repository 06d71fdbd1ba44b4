"""What was measured once on this machine, kept as small JSON files in the cache folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from viasd.errors import ViasdError
from viasd.files import cache_folder, make_folder, write_atomically

_T = TypeVar("_T")


def remembered(
    kind: str,
    said: Mapping[str, Any],
    make: Callable[[], _T],
    dump: Callable[[_T], Any],
    parse: Callable[[Any], _T],
) -> _T:
    """A value from the cache folder, or made and kept there.

    A file that can't be read is made anew, and a folder that can't be written is no reason to do without the value: it is
    made again the next time.

    Args:
        kind: Name of the folder.
        said: Everything that the value depends on; JSON-able.
        make: Makes it.
        dump: Turns it into what JSON can hold.
        parse: The reverse; may raise on anything that is no such value.
    """
    path = _path(kind, said)
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        value = make()
    with suppress(ViasdError):  # see above
        make_folder(path.parent)
        write_atomically(path, json.dumps(dump(value), indent=1) + "\n")
    return value


def _path(kind: str, said: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / kind / f"{digest}.json"
