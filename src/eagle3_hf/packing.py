"""oneDNN-packed weights for the linears of a CPU model.

Speculation lives on forwards of 2 to 16 rows, and stock `F.linear` in float32 takes about twice as long for those as
for one row, because the BLAS repacks the whole weight on every call. oneDNN can keep the weight in its own blocked
layout; the same packed tensor then serves any number of rows. A first naive trial was slow because each linear was
packed for its own batch size: packed for `PACK_ROWS`, no reorder happens at run time.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

PACK_ROWS = 32


def packing_available() -> bool:
    """Whether this build of torch has the oneDNN operators that packed weights need."""
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    return hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")


def _packs(weight: torch.Tensor) -> bool:
    """Whether a weight is an ordinary float32 CPU tensor.

    Quantised ones (torchao) are tensors of another class inside an ordinary `nn.Linear`, with a kernel of their own,
    and they say that they are float32.
    """
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


class PackedLinear(nn.Linear):
    """`nn.Linear` whose inference forward uses a packed copy of the weight.

    The weight itself stays where it was: `state_dict`, training and `save_pretrained` see an ordinary linear. The
    packed copy is made at the first call and again when the weight was changed or replaced.
    """

    _packed: tuple[Any, torch.Tensor] | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            return super().forward(input)
        if input.dtype != torch.float32 or input.device.type != "cpu" or not _packs(weight):
            return super().forward(input)
        if torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return super().forward(input)
        # A weight made under inference_mode has no version counter.
        version = (weight.data_ptr(), None if weight.is_inference() else weight._version)
        packed = self._packed
        if packed is None or packed[0] != version:
            with torch.no_grad():
                packed = (version, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACK_ROWS))
            self._packed = packed
        return torch.ops.mkldnn._linear_pointwise(input, packed[1], self.bias, "none", [], "")

    def __getstate__(self) -> dict:
        # copy and pickle come through here: the packed tensor is opaque, so a copy packs its own.
        return {**self.__dict__, "_packed": None}


def pack_linears(model: nn.Module) -> int:
    """Let every plain float32 CPU `nn.Linear` of `model` run on packed weights.

    Costs one more copy of those weights in memory. Results differ from the stock kernels by float32 rounding only.
    Linears of another class (quantised, LoRA, ...) are left alone.

    Args:
        model: changed in place.

    Returns:
        How many linears were switched; 0 where the platform has no packed kernels.
    """
    if not packing_available():
        logger.info("this torch build has no oneDNN packed linears; nothing was changed")
        return 0
    count = 0
    for module in model.modules():
        if type(module) is nn.Linear and _packs(module.weight):
            module.__class__ = PackedLinear
            module._packed = None
            count += 1
    return count


def unpack_linears(model: nn.Module) -> int:
    """Undo [`pack_linears`] and free the packed copies; returns how many linears were switched back."""
    count = 0
    for module in model.modules():
        if type(module) is PackedLinear:
            module.__class__ = nn.Linear
            del module._packed
            count += 1
    return count
