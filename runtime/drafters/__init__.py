"""Where proposals come from: a model, the target's states, its own layers, earlier text, or two of these together."""

from viasd.runtime.drafters.base import Draft, Drafter, PasslessDrafter, SteppedDrafter
from viasd.runtime.drafters.feature import FeatureDrafter, run_features
from viasd.runtime.drafters.horizontal import HorizontalDrafter
from viasd.runtime.drafters.line import ModelLine, run_drafts
from viasd.runtime.drafters.lookup import LookupDrafter
from viasd.runtime.drafters.lookup_first import LookupFirstDrafter
from viasd.runtime.drafters.model import ModelDrafter
from viasd.runtime.drafters.self_route import SelfDrafter
from viasd.runtime.drafters.vertical import BlockDrafter, VerticalDrafter

__all__ = [
    "BlockDrafter",
    "Draft",
    "Drafter",
    "FeatureDrafter",
    "HorizontalDrafter",
    "LookupDrafter",
    "LookupFirstDrafter",
    "ModelDrafter",
    "ModelLine",
    "PasslessDrafter",
    "SelfDrafter",
    "SteppedDrafter",
    "VerticalDrafter",
    "run_drafts",
    "run_features",
]
