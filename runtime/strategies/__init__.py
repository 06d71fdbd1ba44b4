"""Decoding strategies: plain, two tiers, and three tiers chained or gated."""

from viasd.runtime.strategies.base import Emission, Strategy, Workbench
from viasd.runtime.strategies.chain import ChainedCascade
from viasd.runtime.strategies.plain import Plain
from viasd.runtime.strategies.sd import SpeculativeDecoding
from viasd.runtime.strategies.via import GatedCascade

__all__ = ["ChainedCascade", "Emission", "GatedCascade", "Plain", "SpeculativeDecoding", "Strategy", "Workbench"]
