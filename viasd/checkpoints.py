"""Loads one model or tokenizer from the hub, a folder or a GGUF file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from viasd import hub
from viasd.errors import LoadError, OptionError
from viasd.forms import LAYERS
from viasd.gguf_convert import write_known_tokenizer
from viasd.hardware import quantization_config, require_memory, resolve_device, resolve_dtype
from viasd.quantized import QUANTIZED, check_quantized

WEIGHTS = ("auto", "hub", "packaged")

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")


@dataclass(frozen=True)
class LoadConfig:
    """How to load.

    Attributes:
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:N`` or ``mps``.
        dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
        device_map: Passed to transformers to spread the target over devices (``"auto"``, ``"balanced"``, ...).
        quantization: ``int8`` or ``int4`` (`viasd.quantized`, by torch's own products on a CPU), or a back-end's name in
            `viasd.hardware.QUANTIZATIONS`; applies to the target.
        layers: ``auto`` (written out and fused where a layer allows it), ``hf`` (the modules of transformers) or ``fused``
            (refuses a model that does not allow it); see `viasd.layered.LayeredModel`.
        weights: ``auto`` falls back to packaged demo weights where the hub can't be reached and such exist;
            ``hub`` forbids them, ``packaged`` uses nothing else.
        drafter_device: Device of the drafter model, None for the target's.
        drafter_dtype: Dtype of the drafter model, None for the target's.
        quiet: No progress bars.
        trust_remote_code: Let transformers run code from the checkpoint.
        compile: Run passes of few tokens as compiled graphs; see `viasd.layered.LayeredModel.compile`.
    """

    device: str = "auto"
    dtype: str = "auto"
    device_map: str | None = None
    quantization: str | None = None
    weights: str = "auto"
    drafter_device: str | None = None
    drafter_dtype: str | None = None
    quiet: bool = False
    trust_remote_code: bool = False
    layers: str = "auto"
    compile: bool = False

    @property
    def own_quantization(self) -> str | None:
        """The quantization if it is one of `viasd.quantized`, None if it is a back-end's or there is none."""
        return self.quantization if self.quantization in QUANTIZED else None

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise OptionError(f"weights must be one of {', '.join(WEIGHTS)}, but got {self.weights!r}")
        if self.device_map is not None and self.device != "auto":
            raise OptionError(f"device_map places the model itself, so device must be auto, but got {self.device!r}")
        if self.layers not in LAYERS:
            raise OptionError(f"layers must be one of {', '.join(LAYERS)}, but got {self.layers!r}")
        if self.own_quantization and self.device_map is not None:
            raise OptionError(f"quantization {self.quantization} runs on one CPU, but device_map spreads the model")
        if self.compile:
            self._check_compile()

    def _check_compile(self) -> None:
        if self.layers == "hf":
            raise OptionError("compile needs layers that are written out, but layers='hf' was asked for; leave one out")
        if self.device_map is not None:
            raise OptionError("compile needs a model on one device, but device_map spreads it; leave one out")
        if self.quantization is not None and self.own_quantization is None:
            raise OptionError(
                f"compile needs layers that are written out, but the back-end of {self.quantization} brings its own; "
                "leave one out"
            )


def load_model(ref: str, config: LoadConfig | None = None) -> PreTrainedModel:
    """Load a causal language model in eval mode onto its device.

    Args:
        ref: Hub id, local folder, or ``.gguf`` file (unpacked to the dtype).
        config: How; None for all defaults.

    Raises:
        OptionError: If device, dtype or quantization is unknown or not present.
        LoadError: If it can't be found, fetched, read or held in memory, or lacks weights.
        UnsupportedModelError: If transformers does not know the architecture.
    """
    config = config or LoadConfig()
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.own_quantization:
        check_quantized(config.own_quantization, config.layers, device)
    backend = None if config.own_quantization else config.quantization
    place, options = _locate(ref)
    options["trust_remote_code"] = config.trust_remote_code
    try:
        with _progress_bars(shown=not config.quiet and not Path(place).exists()):
            if "gguf_file" not in options:  # reading a GGUF header takes seconds
                settings = AutoConfig.from_pretrained(place, **options)
                if config.device_map is None:
                    require_memory(settings, dtype, device, ref, backend)
            elif hasattr(transformers, "GgufConfig"):
                # Newer versions would keep the weights packed where they have a kernel for it.
                options["quantization_config"] = transformers.GgufConfig(dequantize=True)
            if backend is not None:
                if "gguf_file" in options:
                    raise OptionError(f"quantization applies to folders and hub ids, but {ref} is a GGUF file")
                options["quantization_config"] = quantization_config(backend, dtype)
            if config.device_map is not None:
                options["device_map"] = config.device_map
            elif device.type != "cpu" or backend is not None:
                options["device_map"] = {"": device}
            model, report = AutoModelForCausalLM.from_pretrained(
                place, dtype=dtype, output_loading_info=True, **options
            )
    except Exception as error:
        raise hub.explain(error, ref) from error
    # transformers fills what is missing with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise LoadError(f"{ref} lacks {len(missing)} weights, the first is {missing[0]}; fetch the checkpoint again")
    return model


def load_tokenizer(ref: str, config: LoadConfig | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a hub id, local folder or ``.gguf`` file.

    Raises:
        LoadError: If it can't be found, fetched or read.
    """
    config = config or LoadConfig()
    place, options = _locate(ref)
    options["trust_remote_code"] = config.trust_remote_code
    # transformers would make an empty tokenizer of the model's type.
    if Path(place).is_dir() and not options.get("gguf_file") and not _has_tokenizer(Path(place)):
        raise LoadError(f"{ref} has no tokenizer; add its tokenizer.json")
    try:
        with _progress_bars(shown=not config.quiet and not Path(place).exists()):
            tokenizer = _known_gguf_tokenizer(Path(place), options) or AutoTokenizer.from_pretrained(place, **options)
    except Exception as error:
        raise hub.explain(error, ref) from error
    return tokenizer


def _locate(ref: str) -> tuple[str, dict[str, Any]]:
    """Path or hub id for transformers, with the options that belong to it."""
    path = Path(ref).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadError(f"no GGUF file at {ref}; check the path")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LoadError(f"{ref} holds no config.json; expected a model saved with save_pretrained")
        return str(path), {}
    if path.exists():
        raise LoadError(f"expected a folder, a .gguf file or a hub id, but {ref} is another kind of file")
    if path.is_absolute() or ref.startswith((".", "~")) or len(path.parts) > 2:
        raise LoadError(f"no folder at {ref}; check the path, or give a hub id such as OWNER/NAME")
    try:
        cached = hub.is_cached(ref)
    except ValueError as error:  # not a well-formed hub id
        raise hub.explain(error, ref) from error
    if cached:
        return ref, {"local_files_only": True}
    if not hub.is_reachable():
        raise hub.unreachable(ref)
    return ref, {}


def _has_tokenizer(folder: Path) -> bool:
    return any(path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern))


def _known_gguf_tokenizer(folder: Path, options: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    if "gguf_file" not in options:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        if write_known_tokenizer(folder / options["gguf_file"], Path(scratch)):
            return AutoTokenizer.from_pretrained(scratch)
    return None


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Hide transformers' and the hub's bars for a while if not `shown`; local loads take too short to need any."""
    logging = transformers.utils.logging
    if shown or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
