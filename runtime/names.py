"""Names of the strategies, and what each of them needs. Nothing here imports torch."""

from __future__ import annotations

#: Rules of Faster Cascades (`viasd.deferral`), each a strategy with a law of its own.
RULES = ("chow", "diff", "opt", "token-v1", "token-v2", "token-v3")
#: Strategies of the literature, for comparison.
BASELINES = ("lossy", *RULES, "vertical", "horizontal", "self-sd", "slim")
STRATEGIES = ("auto", "plain", "sd", "cascade", "adadecode", *BASELINES)
#: Strategies with a parameter alpha of their own.
LOSSY = ("lossy", *RULES)
#: Strategies that use a mask, `auto` where there is one.
MASKED = ("auto", "cascade", "self-sd", "slim")
#: Strategies with a slim verifier (`auto` where there is a mask).
SLIM_TIERED = ("auto", "cascade", "slim")
#: Strategies that guess at exits of the target's own.
EXITING = ("adadecode",)
#: Strategies that use no drafter.
UNDRAFTED = ("plain", "slim", *EXITING)
#: Strategies whose law follows from their name; the others take a mode.
MODELESS = (*LOSSY, "slim")

MODES = ("lossless", "bounded", "via")
