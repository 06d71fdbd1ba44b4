"""Decoding in tiers inside transformers: `viasd.hf.generate` as the ``custom_generate`` of `model.generate`."""

from pathlib import Path

from viasd.runtime.hf.decode import LossyWarning, generate

#: For ``custom_generate=FOLDER, trust_remote_code=True``. Its subfolder ``custom_generate`` can be copied into a model's
#: folder, whose `generate` is then viasd's wherever it is loaded with ``trust_remote_code=True``.
FOLDER = str(Path(__file__).parent)

__all__ = ["FOLDER", "LossyWarning", "generate"]
