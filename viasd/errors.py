"""Every failure a user can cause or meet derives from `ViasdError`; the command line prints it in one line and exits 2."""


class ViasdError(Exception):
    """Base of all errors raised on purpose. The message says what was expected, what was found and what to do."""


class OptionError(ViasdError):
    """Raised when an option is out of range or contradicts another one, before anything is loaded or run."""


class PairError(ViasdError):
    """Raised when a pair name, a family or a size is not in the registry."""


class LoadError(ViasdError):
    """Raised when a checkpoint or tokenizer can't be read: missing, gated, unreachable, broken or too large."""


class WeightsError(LoadError):
    """Raised when the packaged demo weights can't be fetched, verified, converted or cached."""


class TokenizerMismatchError(ViasdError):
    """Raised when drafter and target do not map the same strings to the same ids."""


class UnsupportedModelError(ViasdError):
    """Raised when a model can't be driven layer by layer exactly: unknown shape, recurrent state, or a failed probe."""


class MaskError(ViasdError):
    """Raised when a layer mask is malformed or belongs to another model."""


class HeadsError(ViasdError):
    """Raised when a file of light heads is malformed or belongs to another model."""


class ContextLengthError(ViasdError):
    """Raised when prompt and requested tokens do not fit the model's context."""


class CapacityError(ViasdError):
    """Raised when a request's keys and values could never fit into the memory set aside for them."""


class ProcessorError(ViasdError):
    """Raised when a logits processor can't be evaluated ahead of committed tokens (it can't be copied)."""


class FitError(ViasdError):
    """Raised when something can't be trained: an unfit corpus, a run that can't go on, or a loss that is no number."""


class KernelError(ViasdError):
    """Raised when the CPU kernels can't be had on this machine (everything works without them), or have no memory."""


class DrafterError(ViasdError):
    """Raised when a file of a fitted drafter is malformed or was made for another target."""
