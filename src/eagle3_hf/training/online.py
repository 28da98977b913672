"""Features computed while training: the target in the loop instead of on the disk.

Costs a target forward for each batch and each epoch, and no storage: the choice where stored features wouldn't fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .target_states import TargetTeacher


class OnlineFeatures:
    """Turns batches of tokens into the batches that stored features give.

    Args:
        model: the target, frozen, on the device that trains.
        aux_layers: see [`TargetTeacher`].
        teacher: `hidden`, or `logits` for targets that scale or cap their logits after the head.
        vocabulary: int64 `[Vd]`, target ids in the draft's order; with `logits` only these are kept.
        dtype: of features and final states; default: the model's.

    Raises:
        ValueError: another teacher: storing the top k is for disks.
    """

    def __init__(
        self,
        model: Any,
        aux_layers: Sequence[int] | None = None,
        teacher: str = "hidden",
        vocabulary: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):
        if teacher not in ("hidden", "logits"):
            raise ValueError(f"online features have teacher hidden or logits; got {teacher!r}")
        self.teacher = TargetTeacher(model.eval(), aux_layers, teacher)
        self.aux_layers = self.teacher.aux_layers
        self.dtype = dtype or model.dtype
        self.vocabulary = None if vocabulary is None else vocabulary.to(model.device)

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add `features`, `teacher_argmax` and `teacher_hidden` or `teacher_logits` to a batch.

        Args:
            batch: of [`FeatureCollator`] over a [`TokenDataset`]: `input_ids`, `loss_mask`, with packed rows also
                `document_ids` and `position_ids`.

        Returns:
            A new dict, everything on the target's device.
        """
        device = self.teacher.model.device
        batch = {name: value.to(device) for name, value in batch.items()}
        states = self.teacher(
            batch["input_ids"], batch["loss_mask"], batch.get("document_ids"), batch.get("position_ids")
        )
        batch["features"] = states.aux.to(self.dtype)
        batch["teacher_argmax"] = states.argmax
        if states.logits is None:
            batch["teacher_hidden"] = states.hidden.to(self.dtype)
            return batch
        kept = states.logits if self.vocabulary is None else states.logits[:, self.vocabulary]
        logits = torch.zeros(*states.needed.shape, kept.shape[-1], device=device)
        logits[states.needed] = kept.float()
        batch["teacher_logits"] = logits
        return batch
