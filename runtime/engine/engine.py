"""`Engine`: continuous batching. Every step takes each running request through one round, in passes that they share."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from viasd.errors import OptionError, ViasdError
from viasd.heads import LightHeads
from viasd.mask import LayerMask
from viasd.pair import Pair, Prompt
from viasd.runtime.answer import Answer
from viasd.runtime.assembly import headed
from viasd.runtime.config import GenerationConfig
from viasd.runtime.engine.adaptive import MODES, AdaptivePolicy
from viasd.runtime.engine.batch import Reply, draft_pass, full_pass, slim_pass
from viasd.runtime.engine.memory import KVBudget, worst_bytes, worst_positions
from viasd.runtime.engine.policy import AdmissionPolicy, AdmitAll, Block
from viasd.runtime.engine.request import EngineEvent, Request
from viasd.runtime.engine.turns import TURNS, Turn
from viasd.runtime.names import EXITING
from viasd.runtime.passes import Admission, FullPass, Judged, SlimPass
from viasd.runtime.requests import check_prompt_kind, resolved, settled_config
from viasd.runtime.result import Result
from viasd.runtime.target import prefill_chunk

CONCURRENCY = 16


class Engine:
    """Answers many requests at once.

    What a request says does not depend on the others: each has its own sampling, seed, processors, stops, strategy and
    guard, and its rows are computed from its own tokens alone. With the CPU kernels they are the same bits as alone, light
    heads and shortlists included. Torch's products, which may round differently in another company, are used elsewhere, and
    for the stitches of a mask: these shape proposals of the slim verifier and no row of the full one.

    Not thread-safe: one thread adds, steps and cancels.

    Args:
        pair: A loaded pair. All requests share it.
        mask: What requests with a slim verifier use: a `LayerMask`, what ``--mask`` takes, or None.
        heads: Light heads of a mask ``prefix:E``, or what ``--heads`` takes.
        concurrency: Most requests that run at once; the others wait in order.
        kv_budget: Bytes for keys and values; None is half of what is free on the target's device. A request waits until the
            most that it can need is free.
        chunk: Tokens of a prompt that are run at a time; None is what suits the device.
        prompt_budget: Tokens of prompts in one pass, over all requests; None is one chunk. It bounds how long a prompt can
            hold up the others. At least one piece is run even if it is longer.
        adaptive: Adaptive Verification (`viasd.runtime.engine.adaptive`): ``off`` drafts and verifies whole blocks, ``on``
            as much as pays by costs that are measured once per machine, ``auto`` likewise where it can pay (never for a
            request alone, which chooses the length of its drafts itself).
        adaptive_state: What an earlier engine's has learnt (`adaptive_state`).
        policy: Decides instead how many drafted tokens are verified.
        isolated: Whether what goes wrong in one request (its own code, its share of a pass) ends that request alone;
            otherwise the exception leaves `step`, and all requests end.

    Attributes:
        results: What has ended, by request. Take results out to free their memory.
        tracebacks: Where requests that ended with an error went wrong.
    """

    def __init__(
        self,
        pair: Pair,
        *,
        mask: LayerMask | str | None = "auto",
        heads: LightHeads | str | None = "auto",
        concurrency: int = CONCURRENCY,
        kv_budget: int | None = None,
        chunk: int | None = None,
        prompt_budget: int | None = None,
        adaptive: str = "off",
        adaptive_state: Mapping[str, Any] | None = None,
        policy: AdmissionPolicy | None = None,
        isolated: bool = True,
    ) -> None:
        for name, value in (("concurrency", concurrency), ("chunk", chunk), ("prompt_budget", prompt_budget)):
            if value is not None and value < 1:
                raise OptionError(f"{name} must be at least 1, but got {value}")
        self.pair = pair
        mask, self.heads = resolved(pair, mask, heads)
        self.mask = headed(mask, self.heads, pair)
        self.concurrency = concurrency
        self.budget = KVBudget.of(pair, kv_budget)
        self.chunk = chunk or prefill_chunk(pair.target.device)
        self.prompt_budget = prompt_budget or self.chunk
        if adaptive not in MODES:
            raise OptionError(f"adaptive must be one of {', '.join(MODES)}, but got '{adaptive}'")
        if policy is not None and adaptive != "off":
            raise OptionError(f"give either a policy or adaptive, but got both (adaptive '{adaptive}')")
        if adaptive_state is not None and adaptive == "off":
            raise OptionError("adaptive_state is of adaptive verification, which is off; add adaptive='auto' or 'on'")
        if adaptive == "on" or (adaptive == "auto" and concurrency > 1):
            policy = AdaptivePolicy(pair, concurrency, adaptive, state=adaptive_state)
        self.policy: AdmissionPolicy = policy or AdmitAll()
        self._isolated = isolated
        self.results: dict[int, Result] = {}
        self.tracebacks: dict[int, str] = {}
        self._next = 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._ended: list[EngineEvent] = []  # by cancelling, since the last step

    def add(
        self, prompt: Prompt, *, config: GenerationConfig | None = None, name: str | None = None, **options: Any
    ) -> int:
        """Takes a request.

        Args:
            prompt: Text, chat messages, or token ids.
            config: A ready configuration, instead of `options`.
            name: What its lines in a log begin with; None is ``request`` and its number.
            **options: Fields of `GenerationConfig`, `SamplingConfig` and `DecodingConfig`, as for `viasd.generate`. A
                stateful logits processor belongs to one request.

        Returns:
            The request's number.

        Raises:
            CapacityError: If its keys and values could never fit into the budget.
            ViasdError: If anything else about it can't be done.
        """
        config = settled_config(config, options)
        _check_shares(config)
        if isinstance(self.policy, AdaptivePolicy):
            config = self.policy.paced(config)
        chat = check_prompt_kind(prompt)
        mask = None if config.decoding.unmasked else self.mask
        answer = Answer(
            self.pair,
            self.pair.encode(prompt),
            config,
            mask=mask,
            heads=None if mask is None or mask.prefix is None else self.heads,
            chat=chat,
            chunk=self.chunk,
            name=name or f"request {self._next}",
        )
        return self.enter(answer)

    def enter(self, answer: Answer) -> int:
        """Takes a request that is an answer already, of this engine's pair.

        Returns:
            The request's number.

        Raises:
            CapacityError: If its keys and values could never fit into the budget.
            OptionError: If its strategy can't share passes.
        """
        _check_shares(answer.config)
        if isinstance(self.policy, AdaptivePolicy) and (note := self.policy.passed_over(answer)):
            answer.notes.append(note)
        needed = worst_bytes(answer)
        self.budget.check(needed, worst_positions(answer))
        request = Request(self._next, answer, needed)
        self._next += 1
        self._waiting.append(request)
        return request.number

    def adaptive_state(self) -> dict[str, Any] | None:
        """What Adaptive Verification has learnt, ready for `json.dumps`; None where it is not at work."""
        return self.policy.state() if isinstance(self.policy, AdaptivePolicy) else None

    @property
    def busy(self) -> bool:
        """Whether anything runs, waits, or has yet to be told."""
        return bool(self._running or self._waiting or self._ended)

    @property
    def running(self) -> list[int]:
        """Requests that have memory."""
        return [request.number for request in self._running]

    @property
    def waiting(self) -> list[int]:
        """Requests that wait for memory or a place, in order."""
        return [request.number for request in self._waiting]

    def step(self) -> list[EngineEvent]:
        """One round of every request whose prompt has been run, and pieces of prompts that have not.

        Returns:
            What came of it; empty if only prompts were run. If it is interrupted (Ctrl-C), every request ends as
            ``interrupted`` with what it has.
        """
        events, self._ended = self._ended, []
        try:
            with torch.inference_mode():
                self._let_in()
                self._start_rounds()
                self._finish_rounds()
                events += self._taken()
        except BaseException:
            self.close()
            raise
        # What ended in this step was told in order; a policy may have cancelled more.
        events += self._ended
        self._ended = []
        return events

    def stream(self) -> Iterator[EngineEvent]:
        """Steps until nothing is left; requests may be added and cancelled meanwhile."""
        while self.busy:
            yield from self.step()

    def cancel(self, request: int) -> Result:
        """Ends a request now, with what it has; its memory is free at once. One that has ended stays as it is.

        Raises:
            OptionError: If there is no such request.
        """
        found = next((r for r in (*self._running, *self._waiting) if r.number == request), None)
        if found is not None:
            self._end(found, "interrupted")
        if request not in self.results:
            raise OptionError(f"there is no request {request}; the engine has had {self._next} so far, from 0 on")
        return self.results[request]

    def close(self) -> None:
        """Cancels everything."""
        for request in [*self._running, *self._waiting]:
            self._end(request, "interrupted")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_in(self) -> None:
        """Requests in order, as long as there is a place and memory; nobody overtakes."""
        while self._waiting and len(self._running) < self.concurrency and self.budget.reserve(self._waiting[0].needed):
            self._running.append(self._waiting.popleft())

    def _start_rounds(self) -> None:
        ready = [request for request in self._running if request.ready]
        self.policy.begin([(request.number, request.answer) for request in ready])
        for request in ready:
            self._guarded(request, request.begin_round)

    def _finish_rounds(self) -> None:
        """Answers work kind by kind until every round has ended: those of a kind wait for each other."""
        prompts = self._prompts()
        fed = sum(request.piece for request in prompts)
        while True:
            turns = {turn: requests for turn in TURNS if (requests := self._waiting_for(turn))}
            turn = next(iter(turns), None)
            if turn is None or turn.kind is FullPass:
                break
            requests = turns[turn]
            if turn.kind is Admission:
                self._admit(requests, turn.verifier, fed)
            else:
                self._reply(requests, (slim_pass if turn.kind is SlimPass else draft_pass)(requests))
        # Nothing but full passes is waited for. They come last in every round, so none begins after this one.
        requests = [request for request in self._running if request.work is not None]
        if requests or prompts:
            replies = full_pass(requests, prompts)
            self._reply(requests, replies[: len(requests)])
            for request, reply in zip(prompts, replies[len(requests) :], strict=True):
                if isinstance(reply, Exception):
                    self._fail(request, reply)

    def _waiting_for(self, turn: Turn) -> list[Request]:
        return [request for request in self._running if request.work is not None and turn.covers(request.work)]

    def _prompts(self) -> list[Request]:
        """Requests whose prompt's next piece is run in this step: in order, as many as the budget holds."""
        chosen: list[Request] = []
        left = self.prompt_budget
        for request in list(self._running):
            if request.ready:
                continue
            tokens = request.piece or self.chunk  # of the drafter alone, once the target has all of it
            if tokens > left < self.prompt_budget:
                break
            left -= tokens
            if self._guarded(request, request.warm_up) and request.piece:
                chosen.append(request)
        return chosen

    def _admit(self, requests: Sequence[Request], verifier: str, prompts: int) -> None:
        if verifier == "full":
            others = prompts + sum(request.work is not None for request in self._running)
        else:
            others = len(requests)
        blocks = []
        for request in requests:
            assert isinstance(request.work, Admission)
            blocks.append(Block(request.number, request.answer, request.work))
        admitted = self.policy.admit(blocks, others)
        for request, n in zip(requests, admitted, strict=True):
            self._advance(request, n)

    def _reply(self, requests: Sequence[Request], replies: Sequence[Reply]) -> None:
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, Exception):
                self._fail(request, reply)
            else:
                self._advance(request, reply)

    def _advance(self, request: Request, reply: Any) -> None:
        self._guarded(request, lambda: request.advance(reply))
        while isinstance(verdict := request.work, Judged):
            self.policy.judged(request.number, request.answer, verdict)
            self._guarded(request, lambda: request.advance(None))

    def _taken(self) -> list[EngineEvent]:
        """Events of the rounds that have ended."""
        events: list[EngineEvent] = []
        for request in list(self._running):
            if request.outcome is None:
                continue
            (emission, reason), request.outcome = request.outcome, None
            answer = request.answer
            found = answer.take(emission)
            if reason is not None and (rest := answer.rest()) is not None:
                found.append(rest)
            events += [EngineEvent(request.number, *event, selected_layers=event.selected_layers) for event in found]
            if reason is not None:
                self._end(request, reason)
                events += self._ended
                self._ended = []
        return events

    def _guarded(self, request: Request, act: Callable[[], None]) -> bool:
        """Does something of one request's own, and says whether it went well; if not, that request ends and no other."""
        try:
            act()
        except Exception as error:
            self._fail(request, error)
            return False
        return True

    def _fail(self, request: Request, error: Exception) -> None:
        if not self._isolated:
            raise error
        self.tracebacks[request.number] = "".join(traceback.format_exception(error))
        said = str(error) if isinstance(error, ViasdError) else f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            said = f"out of memory on {self.pair.device}; use a shorter prompt, a lower concurrency, or another --dtype"
        # The traceback holds the frames, and they the caches.
        error.__traceback__ = None
        self._end(request, "error", said)

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        """Ends a request, whatever it is doing; its memory goes back."""
        if request in self._running:
            self._running.remove(request)
            self.budget.release(request.needed)
        elif request in self._waiting:
            self._waiting.remove(request)
        else:
            return  # it has ended already
        request.drop()
        result = request.answer.finish(reason, error)
        self.results[request.number] = result
        self._ended.append(EngineEvent(request.number, "", [], "", result.stats, result))
        self.policy.ended(request.number)


def _check_shares(config: GenerationConfig) -> None:
    """Refuses a strategy whose passes are no one else's."""
    if config.decoding.strategy in EXITING:
        raise OptionError(
            f"strategy {config.decoding.strategy} runs its tokens through the layers in a wave of its own, which other "
            "sequences can't share; use viasd.generate for one prompt at a time"
        )
