"""The chat of `viasd-run` at a terminal: a conversation, commands that change how it goes on, and its history."""

from __future__ import annotations

import contextlib
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import viasd
from viasd.errors import ContextLengthError, OptionError, ViasdError
from viasd.files import cache_folder, make_folder, write_atomically
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.api import make_config
from viasd.runtime.config import MODES, plan
from viasd.runtime.display import Screen, counts, exits, play, shares
from viasd.runtime.gates import Thresholds
from viasd.runtime.guard import Guard
from viasd.runtime.metrics import Counters
from viasd.runtime.names import UNDRAFTED
from viasd.runtime.options import DEFINITIONS, check_mask_use
from viasd.runtime.prompting import start
from viasd.runtime.result import Result
from viasd.shipped import resolve_mask

try:
    import readline
except ImportError:  # not on every platform; input() then has no history
    readline = None  # type: ignore[assignment]

PROMPT = "> "
HISTORY_LINES = 1000
# Options that only one mode knows; a change of mode drops those of the others.
_MODE_OPTIONS = {
    "via": ("gate", "thresholds", "max_disagreement", "audit", "recheck"),
    "bounded": ("alpha", "slim_rounds"),
    "lossless": ("slim_rounds",),
}
_HELP = """\
/help              this
/reset             forget the conversation
/system [TEXT]     set the system message from here on; without TEXT, remove it
/mode [MODE]       lossless, bounded or via
/mask [SPEC]       layers of the slim verifier: none, auto, even:RATIO or a file
/gamma [N]         longest drafted block
/theta [ACC ESC]   thresholds of via mode
/stats             counts of all answers so far
/save FILE         write the conversation and how it came about as JSON
/quit              leave (so does Ctrl-D); Ctrl-C stops an answer, twice leaves
A line that begins with a blank is sent as it is, even if a / follows."""


class Chat:
    """A conversation at a terminal.

    Args:
        pair: The loaded pair.
        options: Options for `make_config`; commands change them.
        mask: Mask of the slim verifier, or None.
        screen: Where to show things.
        templated: Use the chat template; otherwise each line is completed by itself.
        system: System message.
        heads: Light heads, or what ``--heads`` takes.
        read: Reads a line, as `input` does.

    Raises:
        ViasdError: If the mask is not for this target or the options contradict each other.
    """

    def __init__(
        self,
        pair: Pair,
        options: dict[str, Any],
        mask: LayerMask | None,
        screen: Screen,
        *,
        templated: bool,
        system: str | None = None,
        heads: LightHeads | str | None = "auto",
        read: Callable[[str], str] = input,
    ) -> None:
        self._pair = pair
        self._screen = screen
        self._templated = templated
        self._system = system
        self._heads = heads
        self._read = read
        self._options, self._mask = options, mask
        self._change(options, mask)
        self._guard: Guard | None = None
        self._messages: list[dict[str, str]] = []
        self._turns: list[dict[str, Any]] = []
        self._totals = Counters()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._screen.say(f"{_HELP}\n\n{DEFINITIONS}"),
            "/reset": lambda _: self._reset(),
            "/system": self._set_system,
            "/mode": self._set_mode,
            "/mask": self._set_mask,
            "/gamma": self._set_gamma,
            "/theta": self._set_theta,
            "/stats": lambda _: self._stats(),
            "/save": self._save,
        }

    def run(self) -> None:
        """Reads lines until the person leaves."""
        pair, say = self._pair, self._screen.note
        say(f"{pair.name}: {pair.target_id} ({pair.source}), {pair.dtype} on {pair.device}; /help lists the commands")
        if not self._templated:
            say("plain completion: each line is continued by itself")
        interrupts = 0
        while True:
            try:
                line = self._read(PROMPT)
                interrupts = 0
                if line.strip() == "/quit":
                    return
                if self._handle(line):
                    interrupts = 1
            except UnicodeError:
                self._screen.note("that line is not UTF-8 text; nothing was sent")
            except EOFError:
                self._screen.say("")
                return
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 1:
                    self._screen.say("")
                    return
                self._screen.say("\n(Ctrl-C again, Ctrl-D or /quit leaves)")

    def _handle(self, line: str) -> bool:
        """One line; True if its answer was interrupted."""
        try:
            if line.startswith("/"):
                name, _, rest = line.strip().partition(" ")
                if name not in self._commands:
                    near = difflib.get_close_matches(name, [*self._commands, "/quit"], n=1)
                    hint = f"did you mean {near[0]}? " if near else ""
                    raise OptionError(
                        f"unknown command {name}; {hint}/help lists them, a blank before / sends the line"
                    )
                self._commands[name](rest.strip())
            elif line.strip():
                return self._answer(line)
        except ContextLengthError as error:
            self._screen.say(f"error: {_one_line(error)} (/reset starts over)", style="red")
        except ViasdError as error:
            self._screen.say(f"error: {_one_line(error)}", style="red")
        return False

    def _answer(self, line: str) -> bool:
        question = {"role": "user", "content": line.strip() if self._templated else line}
        prompt: Prompt = line
        if self._templated:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            prompt = [*system, *self._messages, question]
        answer = start(self._pair, prompt, mask=self._mask, heads=self._heads, config=self._config, guard=self._guard)
        result = play(answer, self._screen)
        if answer.session.guard is not None:
            self._guard = answer.session.guard
        if result is None or not result.token_ids:
            return True
        self._screen.status(result)
        self._totals.merge(result.stats)
        self._remember(question, result)
        return result.finish_reason == "interrupted"

    def _remember(self, question: dict[str, str], result: Result) -> None:
        self._messages += [question, {"role": "assistant", "content": result.text}]
        self._turns.append({"system": self._system, "prompt": question["content"], "answer": result.as_json()})

    def _change(self, options: dict[str, Any], mask: LayerMask | None) -> None:
        """Takes over new options and a new mask, or raises and leaves the old ones."""
        config = make_config(options)
        plan(config.decoding, has_mask=mask is not None)
        if mask is not None:
            mask.check(self._pair.target, self._pair.target_id)
        self._options, self._mask, self._config = options, mask, config

    def _reset(self) -> None:
        self._messages.clear()
        self._screen.say("the conversation is forgotten")

    def _set_system(self, text: str) -> None:
        if not self._templated:
            raise OptionError("a system message is part of a chat, but this is plain completion")
        self._system = text or None
        self._screen.say("system message set" if text else "no system message")

    def _set_mode(self, mode: str) -> None:
        if mode:
            if mode not in MODES:
                raise OptionError(f"/mode takes {', '.join(MODES)}, but got '{mode}'")
            foreign = {name for names in _MODE_OPTIONS.values() for name in names} - set(_MODE_OPTIONS[mode])
            dropped = sorted(foreign & self._options.keys())
            self._change({k: v for k, v in self._options.items() if k not in foreign} | {"mode": mode}, self._mask)
            self._guard = None
            if dropped:
                self._screen.say(f"dropped, since mode {mode} does not know them: {', '.join(dropped)}")
        chosen = plan(self._config.decoding, has_mask=self._mask is not None)
        self._screen.say(f"mode {chosen.mode}, strategy {chosen.strategy}")

    def _set_mask(self, spec: str) -> None:
        if spec:
            decoding = self._config.decoding
            check_mask_use(spec, decoding.strategy, decoding.tiers)
            self._change(self._options, resolve_mask(spec, self._pair.target.n_layers, self._pair.name))
            self._guard = None
        if self._mask is None:
            self._screen.say("no mask: two tiers")
        else:
            self._screen.mask(self._mask, always=True)

    def _set_gamma(self, text: str) -> None:
        if text:
            if (name := self._config.decoding.strategy) in UNDRAFTED:
                raise OptionError(f"gamma is the length of a draft, but strategy {name} drafts nothing")
            try:
                gamma = int(text)
            except ValueError as error:
                raise OptionError(f"/gamma takes a whole number, but got '{text}'") from error
            self._change({**self._options, "gamma": gamma}, self._mask)
        self._screen.say(f"gamma {self._config.decoding.gamma}")

    def _set_theta(self, text: str) -> None:
        if text:
            try:
                accept, escalate = (float(part) for part in text.split())
            except ValueError as error:
                raise OptionError(f"/theta takes two numbers, ACC and ESC, but got '{text}'") from error
            self._change({**self._options, "thresholds": Thresholds(accept, escalate)}, self._mask)
            self._guard = None
        thresholds = self._config.decoding.thresholds or Thresholds()
        self._screen.say(f"theta_acc {thresholds.accept:g}, theta_esc {thresholds.escalate:g} (via mode)")

    def _stats(self) -> None:
        totals, audit = self._totals, self._totals.audit
        speed = f"{totals.seconds:.1f} s, {totals.tokens_per_second:.1f} tok/s"
        self._screen.say(f"{len(self._turns)} answers, {totals.emitted} tokens in {speed}")
        self._screen.say(f"{counts(totals)} | {shares(totals)}")
        self._screen.say("time: " + ", ".join(f"{part} {share:.0%}" for part, share in totals.time_share.items()))
        if totals.early.exits:
            self._screen.say(exits(totals))
        if totals.unseen or audit.blocks:
            low, high = audit.interval
            self._screen.say(
                f"{totals.unseen} tokens were not checked by the full verifier; audited disagreement "
                f"{audit.disagreed:.3g} in {audit.tokens} tokens ({low:.1%} to {high:.1%} per token)"
            )

    def _save(self, text: str) -> None:
        if not text:
            raise OptionError("/save takes a file name")
        pair, path = self._pair, Path(text).expanduser()
        settings = {k: v for k, v in self._options.items() if k != "thresholds"}
        if (thresholds := self._options.get("thresholds")) is not None:
            settings |= {"theta_acc": thresholds.accept, "theta_esc": thresholds.escalate}
        content = {
            "viasd": viasd.__version__,
            "pair": pair.name,
            "target": pair.target_id,
            "source": pair.source,
            "dtype": pair.dtype,
            "device": pair.device,
            "mask": None if self._mask is None else self._mask.to_json(),
            "heads": self._heads.name if isinstance(self._heads, LightHeads) else self._heads,
            "options": settings,
            "system": self._system,
            "messages": self._messages,
            "turns": self._turns,
        }
        write_atomically(path, json.dumps(content, ensure_ascii=False, allow_nan=False, indent=2) + "\n", OptionError)
        self._screen.say(f"saved {len(self._turns)} answers to {path}")


@contextlib.contextmanager
def history(screen: Screen) -> Iterator[None]:
    """Keeps the lines typed in a file of the cache folder, where the platform has readline."""
    if readline is None:
        yield
        return
    path = cache_folder() / "history"
    with contextlib.suppress(OSError):  # there is none yet, or another library's
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            make_folder(path.parent, OptionError)
            readline.write_history_file(path)
        except (OSError, ViasdError) as error:
            screen.note(f"the history of this chat was not kept: {error}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
