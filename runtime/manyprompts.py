"""`viasd-run --prompts`: a file of prompts through the engine, answers in the order of their lines."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from viasd.errors import OptionError, ViasdError
from viasd.files import write_atomically
from viasd.runtime.answerfile import AnswerFile
from viasd.runtime.command import INTERRUPTED, complain
from viasd.runtime.display import Screen, print_json
from viasd.runtime.options import PROG, options_from_args
from viasd.runtime.promptfile import PromptLine

if TYPE_CHECKING:
    from viasd.pair import Pair
    from viasd.runtime.engine import Engine
    from viasd.runtime.result import Result

FAILED = 1
_GB = 10**9


def run_prompts(pair: Pair, lines: Sequence[PromptLine], args: argparse.Namespace, screen: Screen) -> int:
    """Answers every line.

    Args:
        pair: The loaded pair.
        lines: What was read from the file.
        args: The options of `viasd-run`.
        screen: Where things are shown.

    Returns:
        Exit code: 0, 1 if a request ended with an error, 130 after Ctrl-C.

    Raises:
        ViasdError: If a request can't be done; names its line, before any is run.
    """
    from viasd.runtime.engine import Engine

    options = options_from_args(args)
    state = None if args.adaptive_state is None else _read_state(args.adaptive_state)
    # Unmasked strategies are told so by the options themselves.
    engine = Engine(
        pair,
        mask=args.mask or "auto",
        heads=args.heads or "auto",
        **({} if args.concurrency is None else {"concurrency": args.concurrency}),
        kv_budget=None if args.kv_budget is None else int(args.kv_budget * _GB),
        adaptive=args.adaptive_verification or "auto",
        adaptive_state=state,
    )
    settings = _settings(pair, engine, args)
    wanted = {line.number: _fingerprint(line, options, settings) for line in lines}
    output = None if args.output is None else AnswerFile(args.output, wanted)
    done = {} if output is None else output.done
    if output is not None and output.mended:
        screen.note("the output file ended in an answer that was not whole or not well; it is made anew")
    if done:
        screen.note(f"{len(done)} of {len(lines)} prompts were answered before; going on from there")
    run = _Run(pair, engine, args, screen, output, {line.number: line for line in lines if line.number not in done})
    run.ask(options)
    return run.answer(len(lines))


class _Run:
    """One run of the engine over what is left of a file."""

    def __init__(
        self,
        pair: Pair,
        engine: Engine,
        args: argparse.Namespace,
        screen: Screen,
        output: AnswerFile | None,
        lines: Mapping[int, PromptLine],
    ) -> None:
        self._pair = pair
        self._engine = engine
        self._args = args
        self._screen = screen
        self._output = output
        self._lines = lines
        self._asked: dict[int, PromptLine] = {}  # by the engine's number
        self._ready: dict[int, Result] = {}  # answers that others have to be shown before
        self._shown = iter(sorted(lines))
        self._next = next(self._shown, None)
        self._tokens = self._failed = self._lossy = 0
        self._offered = self._admitted = 0

    def ask(self, options: Mapping[str, Any]) -> None:
        """Gives all requests to the engine, which checks them."""
        from viasd.runtime.prompting import wants_chat

        args = self._args
        chat = wants_chat(self._pair, args.chat, args.system, base=bool(args.base))
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        for line in self._lines.values():
            prompt: Any = line.prompt
            if line.messages is not None:
                prompt = line.messages
            elif chat:
                prompt = [*system, {"role": "user", "content": line.prompt}]
            try:
                if line.messages is not None and args.chat is False:
                    raise OptionError('"messages" is a chat, but --no-chat leaves the chat template out')
                number = self._engine.add(prompt, name=f"line {line.number}", **{**options, **line.options})
            except ViasdError as error:
                raise type(error)(f"'{args.prompts}', line {line.number}: {error}") from error
            self._asked[number] = line

    def answer(self, of: int) -> int:
        """Runs the engine until everything is answered, or Ctrl-C."""
        started, screen = time.perf_counter(), self._screen
        done = of - len(self._lines)
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=screen.err,
            transient=True,
            disable=screen.quiet or not screen.err.is_terminal,
        ) as bar:
            task = bar.add_task("prompts", total=of, completed=done, speed="")
            try:
                for event in self._engine.stream():
                    self._tokens += len(event.token_ids)
                    if event.result is None:
                        continue
                    self._keep(event.request, event.result)
                    done += 1
                    speed = self._tokens / (time.perf_counter() - started)
                    bar.update(task, completed=done, speed=f"{speed:.1f} tok/s")
            except KeyboardInterrupt:
                bar.stop()
                return self._interrupted(done, of)
        if self._output is not None:
            self._output.finish()
        self._keep_state()
        self._tell(time.perf_counter() - started)
        return FAILED if self._failed else 0

    def _keep(self, number: int, result: Result) -> None:
        line = self._asked[number]
        del self._engine.results[number]
        for note in result.notes if result.lossless else result.notes[:-1]:
            self._screen.note(note)
        self._lossy += not result.lossless
        self._offered += result.stats.adaptive.offered
        self._admitted += result.stats.adaptive.admitted
        if result.error is not None:
            self._failed += 1
            complain(PROG, f"line {line.number}: {result.error}")
        if self._output is not None:
            self._output.add(line.number, _record(line, result))
            return
        self._ready[line.number] = result
        while self._next in self._ready:
            self._show(self._next)
            self._next = next(self._shown, None)

    def _show(self, number: int) -> None:
        result, line, screen = self._ready.pop(number), self._lines[number], self._screen
        if self._args.json:
            print_json(_record(line, result), screen)
            return
        screen.out.out(f"--- {number} ---", style="dim", highlight=False)
        screen.piece(result.text, "full")
        screen.end()

    def _interrupted(self, done: int, of: int) -> int:
        if self._output is not None:
            kept = f"they are in {self._args.output}, and the same command goes on"
        else:
            for number in sorted(self._ready):
                self._show(number)
            kept = "with --output FILE the same command could go on"
        complain(PROG, f"interrupted after {done} of {of} prompts; {kept}")
        return INTERRUPTED

    def _keep_state(self) -> None:
        path, state = self._args.adaptive_state, self._engine.adaptive_state()
        if path is None:
            return
        if state is None:
            self._screen.note("adaptive verification was not at work, so there is nothing for --adaptive-state to keep")
            return
        write_atomically(Path(path), json.dumps(state, indent=1) + "\n", OptionError)

    def _tell(self, seconds: float) -> None:
        screen, n = self._screen, len(self._lines)
        if n and not screen.quiet:
            rate = self._tokens / seconds if seconds else 0.0
            screen.say(
                f"{n} answers, {self._tokens} tokens in {seconds:.1f} s: {rate:.1f} tok/s, up to "
                f"{self._engine.concurrency} at once",
                style="dim",
            )
        if self._offered and not screen.quiet:
            screen.say(
                f"adaptive verification: {self._admitted} of {self._offered} drafted tokens were verified", style="dim"
            )
        if self._lossy:
            screen.say(f"LOSSY: {self._lossy} of {n} answers; each one's last note says how far", style="dim")


def _record(line: PromptLine, result: Result) -> dict[str, Any]:
    """A result with what its line handed through."""
    return {**line.extra, **result.as_json()}


def _read_state(name: str) -> Mapping[str, Any] | None:
    """What an earlier run has learnt; None where there is no such file yet."""
    path = Path(name)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--adaptive-state: can't read '{name}': {error}") from error
    if not isinstance(found, Mapping):
        raise OptionError(f"--adaptive-state: '{name}' holds no state; give another file")
    return found


def _settings(pair: Pair, engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """What all answers of a run depend on."""
    from viasd.identity import ModelIdentity

    target = asdict(ModelIdentity.of(pair.target, pair.target_id))
    feature = None if pair.feature is None else pair.feature.file.digest
    drafter = [pair.drafter_kind, pair.lookup_first, feature]
    return {
        "chat": [args.chat, args.system, bool(args.base)],
        "pair": [pair.name, target, drafter, pair.source, pair.dtype, args.quantization],
        # Its file says what the slim verifier reads out by and what a guard begins with; weights are in the hash alone.
        "mask": None if engine.mask is None else [engine.mask.to_json(), engine.mask.digest],
    }


def _fingerprint(line: PromptLine, options: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What an answer depends on, as far as it was said: another one is not a continuation."""
    said = {
        **settings,
        "prompt": line.prompt,
        "messages": line.messages,
        "extra": line.extra,
        "options": {k: str(v) for k, v in sorted({**options, **line.options}.items())},
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
