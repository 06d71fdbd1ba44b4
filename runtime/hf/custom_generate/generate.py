"""For `model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`, FOLDER being what holds this one."""

from viasd.hf import generate

__all__ = ["generate"]
