"""`objective.kind: plain` for the trainer: an ordinary small causal LM learns a bigger one's distribution."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .plain import plain_distillation, shared_vocabulary
from .slots import Slots


class PlainTrainingModule(nn.Module):
    """The small model and its teacher, with the interface of [`Eagle3TrainingModule`]; it has one step.

    Args:
        draft: the small causal LM, float32.
        loss: see `losses.parse_loss`.
        chain: draft tokens a round in the simulated acceptance length.
    """

    def __init__(self, draft: Any, loss: str = "kl", chain: int = 4):
        super().__init__()
        self.draft, self.loss, self.chain = draft, loss, chain
        # In a list: the teacher must not become a part of what is trained, saved or wrapped.
        self._teacher: list[Any] = []
        self.shared: int | None = None

    def attach(self, teacher: Any, tokenizers: tuple[Any, Any] | None = None) -> None:
        """Give the teacher, on the device that trains, and both tokenizers where the vocabularies are padded apart."""
        self.shared = shared_vocabulary(self.draft, teacher, *(tokenizers or (None, None)))
        self._teacher = [teacher.eval().requires_grad_(False)]

    @property
    def config(self) -> Any:
        """The small model's."""
        return self.draft.config

    def count_slots(self, batch: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
        """Answer tokens of the batch, float32 `[steps]`."""
        answers = Slots(batch["loss_mask"], batch.get("lengths"), batch.get("document_ids")).answers
        return answers.sum().float().expand(steps)

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        step_weights: torch.Tensor,
        denominators: torch.Tensor | None = None,
        measure: bool = False,
        chain: bool = False,
    ) -> dict[str, torch.Tensor]:
        """See [`Eagle3TrainingModule.forward`]. Chain steps are taken as independent: each is right as often as any."""
        result = plain_distillation(
            self.draft,
            self._teacher[0],
            batch["input_ids"],
            batch["loss_mask"],
            shared=self.shared,
            lengths=batch.get("lengths"),
            document_ids=batch.get("document_ids"),
            loss=self.loss,
            denominator=None if denominators is None else denominators[0],
            measure=measure or chain,
        )
        count = len(step_weights)
        divisor = result.count.clamp(min=1) if denominators is None else denominators[0]
        sums = (result.loss.detach() * divisor).expand(count)
        loss = result.loss if chain else result.loss * step_weights[0]
        out = {"loss": loss, "sums": sums, "slots": result.count.expand(count)}
        if measure or chain:
            assert result.correct is not None
            out["scored"], out["correct"] = result.count.expand(count), result.correct.expand(count)
        if chain:
            out["reached"], out["right"] = out["scored"], out["correct"]
        return out

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The small model's own."""
        self.draft.gradient_checkpointing_enable(gradient_checkpointing_kwargs=gradient_checkpointing_kwargs)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """The same, since transformers 5.24."""
        self.draft.activation_checkpointing_enable(**kwargs)

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None, **kwargs: Any) -> None:
        """Save the small model."""
        if state_dict is not None:
            state_dict = {name.removeprefix("draft."): tensor for name, tensor in state_dict.items()}
        self.draft.save_pretrained(folder, state_dict=state_dict, **kwargs)
