"""Where proposals come from: a model, the target with more layers skipped, earlier text, or two of these in a cascade."""

from viasd.runtime.drafters.base import Draft, Drafter, ModelLine, PasslessDrafter, SteppedDrafter, run_drafts
from viasd.runtime.drafters.horizontal import HorizontalDrafter
from viasd.runtime.drafters.lookup import LookupDrafter
from viasd.runtime.drafters.model import ModelDrafter
from viasd.runtime.drafters.self_route import SelfDrafter
from viasd.runtime.drafters.vertical import BlockDrafter, VerticalDrafter

__all__ = [
    "BlockDrafter",
    "Draft",
    "Drafter",
    "HorizontalDrafter",
    "LookupDrafter",
    "ModelDrafter",
    "ModelLine",
    "PasslessDrafter",
    "SelfDrafter",
    "SteppedDrafter",
    "VerticalDrafter",
    "run_drafts",
]
