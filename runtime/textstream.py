"""Token ids that arrive in pieces become text deltas, and stop strings are found on the way.

Decoding token by token is not concatenation: a character may span tokens, and a decoder may treat the first token, or
a run of byte tokens, as a whole. The text of a short window of context plus the new tokens is decoded instead, and
what it adds is the delta; the cost of a token does not depend on the length of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from viasd.errors import OptionError

REPLACEMENT = "\ufffd"
# Tokens of context. What is undecided plus one UTF-8 sequence is at most that many bytes, hence tokens. Of the rules of
# decoders only that on byte runs reaches back further, and these are held back whole.
_KEEP = 12
_WINDOW = 2 * _KEEP  # tokens after which the context is cut to _KEEP again
_MOST_UNDECIDED = 3  # U+FFFD that an unfinished UTF-8 sequence shows as, at most one per byte of it
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Piece:
    """A text delta and the number of tokens it covers: those pushed since the piece before."""

    text: str
    tokens: int


class TextStream:
    """Detokenizer of one answer.

    Joined deltas equal `tokenizer.decode(ids, skip_special_tokens=..., clean_up_tokenization_spaces=False)` of the
    answer's ids, however these are split into pushes, cut where the first stop string begins.

    A run of byte-fallback tokens (`<0xE2>`) is released only when it has ended, because its decoder turns the whole
    run into U+FFFD when any byte of it is wrong. Stop strings are found inside such a run at once.

    Attributes:
        stopped_at: Index in the answer of the token that completed a stop string, or None.
        consumed: How many ids of the latest push remain: all of them unless a stop string was completed before.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_tail_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Start an empty answer.

        Args:
            tokenizer: Decodes; only `decode`, `convert_ids_to_tokens` and `added_tokens_decoder` are used.
            prompt_tail_ids: Last ids of the prompt, if the answer is to read as its continuation: joined deltas then
                equal decode(tail + ids) without decode(tail), which keeps the leading space that some decoders strip
                from a text's first token. Empty: the answer is a text of its own.
            stop_strings: The answer ends before the first of these to be completed; of two completed by the same
                character the longer counts.
            skip_special_tokens: As in `decode`.

        Raises:
            OptionError: A stop string is empty or not a string.
        """
        for stop in stop_strings:
            if not isinstance(stop, str) or not stop:
                raise OptionError(f"stop strings must be non-empty text, but got {stop!r}")
        self.stopped_at: int | None = None
        self.consumed = 0
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._skip_special_tokens = skip_special_tokens
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._silent = special if skip_special_tokens else set()
        self._length = 0
        self._undecided = ""  # text that may be the beginning of a stop string
        self._run = bytearray()  # values of the byte tokens that end the window, not in _shown yet
        self._window = [i for i in prompt_tail_ids if self._visible_name(i) is not None][-_KEEP:]
        # Characters of the window's text that were released or are undecided.
        self._shown = len(self._decode(self._window))

    def push(self, ids: Iterable[int]) -> list[Piece]:
        """Take the next ids of the answer.

        Returns:
            Pieces in order, together covering `consumed` ids; the last one's text is empty where a token's text is
            not known yet. After a stop string was completed: nothing.
        """
        pieces: list[Piece] = []
        self.consumed = waiting = 0
        for token in ids:
            if self.stopped_at is not None:
                break
            self.consumed += 1
            waiting += 1
            text = self._advance(int(token))
            self._length += 1
            if text:
                pieces.append(Piece(text, waiting))
                waiting = 0
        if waiting:
            pieces.append(Piece("", waiting))
        return pieces

    def finish(self) -> str:
        """Text that was held back, now that no more ids come; empty when a stop string ended the answer."""
        if self.stopped_at is not None:
            return ""
        text = self._release(self._new_text(last=True), self._length - 1)
        text += self._undecided
        self._undecided = ""
        return text

    def _advance(self, token: int) -> str:
        name = self._visible_name(token)
        if name is None:
            return ""
        self._window.append(token)
        if byte := _BYTE_TOKEN.fullmatch(name):
            self._run.append(int(byte[1], 16))
            if not self._run_completes_stop():
                return ""
        return self._release(self._new_text(), self._length)

    def _visible_name(self, token: int) -> str | None:
        # What decode leaves out must not split a byte run: special tokens, and ids that name no token (padded
        # vocabulary).
        name: str | None = None if token in self._silent else self._tokenizer.convert_ids_to_tokens(token)
        return name

    def _decode(self, ids: list[int]) -> str:
        skip = self._skip_special_tokens
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text

    def _new_text(self, last: bool = False) -> str:
        """Text of the window beyond what was shown, without U+FFFD at its end that later tokens may complete."""
        self._run.clear()
        text = self._decode(self._window)
        end = len(text)
        while not last and text[end - 1 : end] == REPLACEMENT and len(text) - end < _MOST_UNDECIDED:
            end -= 1
        delta = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) >= _WINDOW:
            context = self._window[-_KEEP:]
            self._window, self._shown = context, self._shown + len(self._decode(context)) - len(text)
        return delta

    def _run_completes_stop(self) -> bool:
        """Whether the answer, ended here, would end in a stop string; asks the bytes first, cheap in a long run."""
        try:
            run = self._run.decode()
        except UnicodeDecodeError:
            return False
        if not (self._undecided + run).endswith(self._stops):
            return False
        text = self._undecided + self._decode(self._window)[self._shown :]
        return any(stop in text for stop in self._stops)

    def _release(self, delta: str, token: int) -> str:
        """Pass on what is known to precede any stop string; `token` is the index of the token that gave the delta."""
        text = self._undecided + delta
        self._undecided = ""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped_at = token
            return text[: min(found)[1]]
        for length in range(min(len(text), self._longest_stop - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                self._undecided = text[-length:]
                return text[:-length]
        return text
