"""Where proposals come from: a model, the target with more layers skipped, or earlier text."""

from viasd.runtime.drafters.base import Draft, Drafter
from viasd.runtime.drafters.lookup import LookupDrafter
from viasd.runtime.drafters.model import ModelDrafter
from viasd.runtime.drafters.self_route import SelfDrafter

__all__ = ["Draft", "Drafter", "LookupDrafter", "ModelDrafter", "SelfDrafter"]
