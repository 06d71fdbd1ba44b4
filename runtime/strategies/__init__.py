"""Decoding strategies: plain, two tiers (also towards another law), three tiers chained or gated, early exits, slim."""

from viasd.runtime.strategies.adadecode import AdaDecode
from viasd.runtime.strategies.base import Emission, SteppedStrategy, Strategy, Workbench
from viasd.runtime.strategies.chain import ChainedCascade
from viasd.runtime.strategies.deferring import DeferringDecoding, lossy, rule_law
from viasd.runtime.strategies.plain import Plain
from viasd.runtime.strategies.sd import SpeculativeDecoding
from viasd.runtime.strategies.slim import SlimAlone
from viasd.runtime.strategies.via import GatedCascade

__all__ = [
    "AdaDecode",
    "ChainedCascade",
    "DeferringDecoding",
    "Emission",
    "GatedCascade",
    "Plain",
    "SlimAlone",
    "SpeculativeDecoding",
    "SteppedStrategy",
    "Strategy",
    "Workbench",
    "lossy",
    "rule_law",
]
