"""Inside transformers: ``model.generate(..., custom_generate=viasd.hf.generate)``; see `viasd.runtime.hf`."""

from viasd.runtime.hf import FOLDER, LossyWarning, generate

__all__ = ["FOLDER", "LossyWarning", "generate"]
