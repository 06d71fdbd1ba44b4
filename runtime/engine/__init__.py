"""Many answers at once over one pair: requests come and go at any round, and their passes are run packed."""

from viasd.runtime.engine.engine import Engine
from viasd.runtime.engine.policy import AdmissionPolicy, AdmitAll, Block
from viasd.runtime.engine.request import EngineEvent

__all__ = ["AdmissionPolicy", "AdmitAll", "Block", "Engine", "EngineEvent"]
