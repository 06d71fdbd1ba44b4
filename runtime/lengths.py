"""How many drafted tokens are worth a pass of the verifier, learnt while decoding.

A pass over ``m + 1`` tokens costs more than one over a single token, and how much more differs from machine to machine; how
many drafted tokens survive differs from text to text. With ``a_i`` the chance that the i-th token of a block is kept when
those before it were, a block of m tokens yields ``E(m) = 1 + a_1 + a_1 a_2 + ... `` tokens in ``m c_p + c_q(m + 1)``
seconds; the length with the best ratio is taken, which is 0 (plain decoding) where drafting does not pay.

The choice looks at committed text and at what became of earlier drafts, never at a drafted token's own value, so the
output's law is untouched (a block's length may depend on everything but the tokens in it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from viasd.draws import SeededDraws
from viasd.runtime.adaptive.budget import best_budget, survivals
from viasd.runtime.drafters import LookupDrafter, LookupFirstDrafter
from viasd.sampling import Sampler

_PRIOR = (0.5, 0.5)  # what is believed of a block nobody has seen: chance of its first token, and of each later one
_PRIOR_SEEN = 2.0  # that belief counts as so many observations
#: Of prompt lookup, by length of the n-gram that matched. Seen in greedy answers of SmolLM2-135M to 24 questions of GSM8K's
#: training split and 8 others (0.25, 0.56, 0.72 at the first place; 0.56-0.70, 0.64-0.77, 0.78-0.87 later).
LOOKUP_PRIORS = {1: (0.25, 0.6), 2: (0.55, 0.65), 3: (0.7, 0.8)}
_FORGET = 0.98  # per observation: a text changes, and what was true of its beginning fades over some 50 tokens
_TRY_AGAIN = 24  # rounds after which a drafter that did not pay is asked for one token
_MOST_ASKED = 0.6  # of a drafter's own certainty: where it may be wrong about that, a block should not vanish
_MARGIN = 1.03  # plain decoding unless a block promises this much more: times are measured, and chances estimated


class DraftLength:
    """Chooses the length of every block of one answer.

    Args:
        gamma: Longest block.
        drafter_seconds: Of one drafted token.
        full_seconds: Of a verifier's pass over 1, 2, ... ``gamma + 1`` tokens.
        priors: By kind of draft, what is believed at first of the chance of its first token and of each later one.
    """

    def __init__(
        self,
        gamma: int,
        drafter_seconds: float,
        full_seconds: Sequence[float],
        priors: Mapping[int, tuple[float, float]] = MappingProxyType({}),
    ) -> None:
        self._priors = priors
        self._seconds = [m * drafter_seconds + full_seconds[m] for m in range(gamma + 1)]
        self._kept: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], float] = {}

    def choose(self, room: int, label: int = 0) -> int:
        """Length of the next block; see `best`."""
        return self.best(room, label)[0]

    def best(self, room: int, label: int = 0) -> tuple[int, float]:
        """Length of the next block, and the tokens a second that it promises.

        Args:
            room: Longest block that still fits.
            label: Kind of the draft (for lookup, how long an n-gram it matched); each kind has chances of its own.
        """
        longest = min(room, len(self._seconds) - 1)
        gains = survivals([self.chance(label, place) for place in range(longest)])
        length = best_budget(gains, 1.0, lambda m: self._seconds[int(m)], _MARGIN)
        if not length:
            return 0, _MARGIN / self._seconds[0]
        return length, (1.0 + sum(gains[:length])) / self._seconds[length]

    def least(self, label: int = 0) -> float:
        """Chance of being kept, with all before it, that a token must have for a block that is one longer to pay.

        One more token costs so many seconds; that is worth it if the tokens it brings come no dearer than the others.
        """
        longest = len(self._seconds) - 1
        cost = (self._seconds[longest] - self._seconds[0]) / max(1, longest)
        return min(max(0.0, cost * self.best(longest, label)[1]), _MOST_ASKED)

    def chance(self, label: int, place: int) -> float:
        """Estimated chance that the token at a place of a block is kept when all before it were."""
        key = label, place
        prior = self._priors.get(label, _PRIOR)[min(place, 1)]
        return (self._kept.get(key, 0.0) + prior * _PRIOR_SEEN) / (self._seen.get(key, 0.0) + _PRIOR_SEEN)

    def observe(self, label: int, kept: int, judged: int) -> None:
        """Learns from one draft.

        Args:
            label: Its kind.
            kept: Tokens kept from its beginning.
            judged: Tokens whose fate is known: those kept, and the one that was not.
        """
        for place in range(judged):
            key = label, place
            self._kept[key] = _FORGET * self._kept.get(key, 0.0) + (place < kept)
            self._seen[key] = _FORGET * self._seen.get(key, 0.0) + 1.0


class Shadow:
    """A draft that was not sent to the verifier, compared with what the answer then says.

    For drafters that cost nothing: where drafting does not pay, this is how a change of the text is noticed. The chance
    that a drafted token (of a law that puts everything on it) equals the next token is the chance that it would be kept.
    """

    def __init__(self) -> None:
        self._label = 0
        self._left: list[int] = []
        self._met = 0

    def watch(self, label: int, tokens: Sequence[int]) -> None:
        """Takes over a draft unless an earlier one is still coming true."""
        if not self._left:
            self._label, self._left, self._met = label, list(tokens), 0

    def drop(self) -> None:
        """Forgets the draft: tokens were committed that it was not compared with."""
        self._left = []

    def meet(self, tokens: Sequence[int], lengths: DraftLength) -> None:
        """Compares committed tokens with the draft and tells `lengths` when its end is known."""
        for token in tokens:
            if not self._left:
                return
            if self._left.pop(0) != token:
                self._left = []
                lengths.observe(self._label, self._met, self._met + 1)
            else:
                self._met += 1
                if not self._left:
                    lengths.observe(self._label, self._met, self._met)


class Pace(Protocol):
    """How long the blocks of one answer are."""

    def limit(self, tokens: Sequence[int], room: int) -> int:
        """Longest block worth drafting after `tokens`, at most `room`."""
        ...

    def judged(self, kept: int, judged: int) -> None:
        """A block met the verifier: so many tokens kept, of so many whose fate is known."""
        ...

    def passed(self, tokens: Sequence[int]) -> None:
        """These tokens were decided without a draft."""
        ...


class ModelPace:
    """For a drafter that costs time: where it does not pay it is asked again only now and then.

    Args:
        lengths: Chooses.
    """

    def __init__(self, lengths: DraftLength) -> None:
        self._lengths = lengths
        self._idle = 0

    def limit(self, tokens: Sequence[int], room: int) -> int:
        """See `Pace`."""
        chosen = self._lengths.choose(room)
        if chosen or self._idle < _TRY_AGAIN:
            return chosen
        self._idle = 0  # also where the drafter then has nothing to say
        return min(1, room)

    def judged(self, kept: int, judged: int) -> None:
        """See `Pace`."""
        self._idle = 0
        self._lengths.observe(0, kept, judged)

    def passed(self, tokens: Sequence[int]) -> None:
        """See `Pace`."""
        self._idle += 1


class LookupPace:
    """For prompt lookup, which costs nothing: what is not worth a pass is followed in the answer instead.

    Drafts are told apart by the n-gram they matched: long matches are right far more often.

    Args:
        lengths: Chooses.
        drafter: The drafter.
        sampler: The request's sampler.
    """

    def __init__(self, lengths: DraftLength, drafter: LookupDrafter, sampler: Sampler) -> None:
        self._lengths = lengths
        self._drafter = drafter
        self._sampler = sampler
        self._shadow = Shadow()
        self._label = 0

    def limit(self, tokens: Sequence[int], room: int) -> int:
        """See `Pace`."""
        self._label = self._drafter.match(tokens)
        if not self._label:
            return 0
        chosen = self._lengths.choose(room, self._label)
        if not chosen and room > 0:
            # A lookup draws nothing, so the request's random streams stay where they are.
            draft = self._drafter.propose(tokens, room, self._sampler.ahead(tokens), SeededDraws(0))
            self._shadow.watch(self._label, draft.tokens)
        return chosen

    def judged(self, kept: int, judged: int) -> None:
        """See `Pace`."""
        self._lengths.observe(self._label, kept, judged)
        self._shadow.drop()

    def passed(self, tokens: Sequence[int]) -> None:
        """See `Pace`."""
        self._shadow.meet(tokens, self._lengths)


class LookupFirstPace:
    """For lookup with a model behind it: each block is drafted by whichever promises more, for as long as that pays.

    What lookup promises is learnt per length of the n-gram it matched, what the model promises per place of a block; both
    follow from earlier blocks alone, and the choice is made before anything is drawn.

    Args:
        lookup: Chooses for lookup, whose tokens cost nothing.
        model: Chooses for the model.
        drafter: The drafter.
        sampler: The request's sampler.
    """

    def __init__(self, lookup: DraftLength, model: DraftLength, drafter: LookupFirstDrafter, sampler: Sampler) -> None:
        self._sampler = sampler
        self._lookup = lookup
        self._model = model
        self._drafter = drafter
        self._label = 0
        self._idle = 0
        # What lookup would have said where the model was asked, the length of its n-gram, and of the text before it.
        self._guess: tuple[list[int], int, int] | None = None

    def limit(self, tokens: Sequence[int], room: int) -> int:
        """See `Pace`."""
        self._look_back(tokens)
        match = self._drafter.lookup.match(tokens)
        found, promised = self._lookup.best(room, match) if match else (0, 0.0)
        drafted, expected = self._model.best(room)
        self._label = match if found and promised >= expected else 0
        self._drafter.choice = "lookup" if self._label else "model"
        if match and not self._label and room > 0:
            # A lookup draws nothing, so the request's random streams stay where they are.
            guess = self._drafter.lookup.propose(tokens, room, self._sampler.ahead(tokens), SeededDraws(0)).tokens
            self._guess = guess, match, len(tokens)
        chosen = found if self._label else drafted
        if chosen or self._idle < _TRY_AGAIN:
            return chosen
        self._idle = 0
        return min(1, room)

    def judged(self, kept: int, judged: int) -> None:
        """See `Pace`."""
        self._idle = 0
        (self._lookup if self._label else self._model).observe(self._label, kept, judged)

    def passed(self, tokens: Sequence[int]) -> None:
        """See `Pace`."""
        self._idle += 1

    def _look_back(self, tokens: Sequence[int]) -> None:
        """Compares what lookup would have said with what was committed since, so that a change of the text is noticed."""
        if self._guess is None:
            return
        (guess, label, at), self._guess = self._guess, None
        said = tokens[at:]
        both = min(len(guess), len(said))
        met = next((i for i in range(both) if guess[i] != said[i]), both)
        self._lookup.observe(label, met, met + (met < both))
