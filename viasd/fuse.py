"""Lays the weights of a layer's linear layers together, so that one product serves those that share an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from viasd.lean import linear_groups, obstacle
from viasd.products import adjoining


@torch.no_grad()
def fuse(layers: Sequence[nn.Module]) -> None:
    """Lays queries, keys and values, and gate and up, one after the other in memory, in every layer that allows it.

    The modules keep their parameters, whose data become views into the common buffer: `state_dict`, saving and the
    model's own forward are as before, and there is no second copy. Layer by layer, so that the peak is one layer more. A
    layer with an `obstacle` stays as it is.
    """
    for layer in layers:
        if obstacle(layer) is not None:
            continue
        for modules in linear_groups(layer):
            _lay_together([module.weight for module in modules])
            biases = [module.bias for module in modules if module.bias is not None]
            if len(biases) == len(modules):
                _lay_together(biases)


def _lay_together(parameters: list[Any]) -> None:
    parts: list[Tensor] = [parameter.data for parameter in parameters]
    if adjoining(parts) is not None:
        return
    buffer = torch.cat(parts)
    for parameter, view in zip(parameters, buffer.split([len(part) for part in parts]), strict=True):
        parameter.data = view
