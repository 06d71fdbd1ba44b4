"""Where a result came from: versions, machine, weights, masks, prompts, command."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers

import viasd
from viasd.hardware import cpu_name
from viasd.mask import LayerMask, ModelIdentity
from viasd.pair import Pair


def environment(pair: Pair) -> dict[str, Any]:
    """What changes speed or output without being asked for: part of the settings that a continued run must share."""
    return {
        "dtype": pair.dtype,
        "device": pair.device,
        "threads": torch.get_num_threads(),
        "kernel": pair.target.kernel,
        "layers": pair.target.form,
        "versions": {"viasd": viasd.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
    }


def provenance(pair: Pair, masks: Mapping[str, LayerMask], argv: Sequence[str]) -> dict[str, Any]:
    """The summary's ``provenance``."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["viasd-bench", *argv]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name(pair.target.device) if pair.target.device.type == "cuda" else None,
        **environment(pair),
        "pair": pair.name,
        "drafter": ("lookup+" if pair.lookup_first else "") + pair.drafter_kind,
        "drafter_file": None if pair.feature is None else pair.feature.file.digest,
        "weights": pair.source,
        "target": asdict(ModelIdentity.of(pair.target, pair.target_id)),
        "masks": {
            name: {
                "keep": "".join(str(int(k)) for k in mask.keep),
                "sha256": mask.digest,
                "skip_ratio": round(mask.skip_ratio, 6),
            }
            for name, mask in masks.items()
        },
    }


def peak_memory(pair: Pair) -> dict[str, int | None]:
    """Largest resident memory of this process so far, and of the GPU's allocations, in bytes; None where not known."""
    gpu = torch.cuda.max_memory_allocated(pair.target.device) if pair.target.device.type == "cuda" else None
    return {"process_bytes": _resident_peak(), "gpu_bytes": gpu}


def _resident_peak() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
