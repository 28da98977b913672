"""What the `Trainer` trains: the draft together with what it learns from, one `forward` for a batch.

Data-parallel wrappers hook into `forward` of the module they wrap, so the whole objective runs inside this one's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..modeling_eagle3 import Eagle3DraftModel
from .acceptance import chain_counts
from .objective import training_time_test
from .slots import Slots
from .teacher import Teacher

_TEACHER = {
    "teacher_hidden": "hidden", "teacher_logits": "logits", "teacher_argmax": "choice", "top_ids": "top_ids",
    "top_values": "top_values", "logsumexp": "logsumexp",
}  # fmt: skip
_OTHERS = ("features", "input_ids", "loss_mask", "lengths", "document_ids")


class Frozen:
    """Tensors that the objective reads and nothing trains, kept out of the module.

    As buffers they would go into every checkpoint, be broadcast by DDP and sharded by FSDP. They follow the batch to
    its device at the first use.
    """

    def __init__(self, **tensors: torch.Tensor | None):
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}

    def get(self, name: str, device: torch.device) -> torch.Tensor | None:
        """The tensor on `device`, or `None` if there is none of that name."""
        tensor = self._tensors.get(name)
        if tensor is not None and tensor.device != device:
            tensor = self._tensors[name] = tensor.to(device)
        return tensor


class Eagle3TrainingModule(nn.Module):
    """The draft and the training-time test.

    Args:
        draft: what is trained.
        embeddings: `[vocab, H]`, the target's table; `None` for a draft with its own.
        teacher_head: `[Vd, Ht]`, the target's head rows of the draft vocabulary; `None` where batches bring
            `teacher_logits`.
        options: further keywords of [`training_time_test`] (`loss`, ...).
    """

    def __init__(
        self,
        draft: Eagle3DraftModel,
        embeddings: torch.Tensor | None = None,
        teacher_head: torch.Tensor | None = None,
        options: dict[str, Any] | None = None,
    ):
        super().__init__()
        if embeddings is None and not draft.config.own_embeddings:
            raise ValueError("this draft has no embeddings of its own: pass the target's")
        self.draft = draft
        self.frozen = Frozen(embeddings=embeddings, teacher_head=teacher_head)
        self.options = dict(options or {})
        # Read on the host before a batch goes to its device, so counting slots costs no synchronisation.
        self.kept_on_host = draft.t2d.detach().cpu().clone()

    @property
    def config(self) -> Any:
        """The draft's."""
        return self.draft.config

    def count_slots(self, batch: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
        """How many slots each step trains on, float32 `[steps]`, where the batch is.

        The objective's means are over these; with their sum over all processes and micro-batches an update is the
        mean over its whole global batch, however it was cut.
        """
        if batch.get("teacher_argmax") is None:
            raise ValueError(f"batches need teacher_argmax, the target's first choices; this one has {sorted(batch)}")
        slots = Slots(batch["loss_mask"], batch.get("lengths"), batch.get("document_ids"))
        choice = batch["teacher_argmax"]
        kept = self.kept_on_host.to(choice.device)
        full = self.options.get("mass") == "full"
        usable = slots.teachable(None if full else kept[choice.clamp(min=0)] & (choice >= 0))
        return torch.stack([slots.ahead(usable, 1 + k).sum() for k in range(steps)]).float()

    def forward(
        self,
        batch: dict[str, torch.Tensor],
        step_weights: torch.Tensor,
        denominators: torch.Tensor | None = None,
        measure: bool = False,
        chain: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Run the objective.

        Args:
            batch: of the collator.
            step_weights: float32 `[steps]`.
            denominators: float32 `[steps]`, what each step's sum is divided by; default: the slots of this batch.
            measure: also count accuracy.
            chain: also count chain acceptance (evaluation).

        Returns:
            `loss`, a scalar; `sums` `[steps]`, each step's loss summed over its slots; `slots` `[steps]`, how many;
            with `measure` int64 `[steps]` each, `scored` and `correct`; with `chain` also `reached` and `right`.
        """
        device = batch["input_ids"].device
        embeddings: Any = self.frozen.get("embeddings", device)
        if embeddings is not None:
            embeddings = nn.functional.embedding(batch["input_ids"], embeddings)
        teacher = {ours: batch[name] for name, ours in _TEACHER.items() if batch.get(name) is not None}
        if "hidden" in teacher:
            teacher["head"] = self.frozen.get("teacher_head", device)
        result = training_time_test(
            self.draft,
            embeddings=embeddings,
            teacher=Teacher(**teacher),
            **{name: batch[name] for name in _OTHERS if batch.get(name) is not None},
            steps=len(step_weights),
            step_weights=step_weights,
            denominators=denominators,
            measure=measure or chain,
            **self.options,
        )
        assert result.counts is not None
        divisors = result.counts.clamp(min=1) if denominators is None else denominators
        out = {"loss": result.loss, "sums": torch.stack(result.losses) * divisors, "slots": result.counts}
        if measure or chain:
            out["scored"] = torch.stack([x.sum() for x in result.scored])
            out["correct"] = torch.stack([x.sum() for x in result.correct])
        if chain:
            out["reached"], out["right"] = chain_counts(result, batch["loss_mask"])
        return out

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Compute the layers again in the backward pass (`training.gradient_checkpointing`).

        Raises:
            ValueError: options that a draft of one or two layers has no use for.
        """
        options = dict(activation_checkpointing_kwargs or {})
        if every_n_layers != 1 or offload or options.pop("use_reentrant", False) or options:
            raise ValueError("checkpointing of a draft's layers takes no options: set training.gradient_checkpointing")
        self.options["checkpoint"] = True

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """The name of the same in transformers before 5.24."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs)

    def save_pretrained(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None, **kwargs: Any) -> None:
        """Save the draft; `state_dict` may be this module's, gathered from its shards."""
        if state_dict is not None:
            state_dict = {name.removeprefix("draft."): tensor for name, tensor in state_dict.items()}
        self.draft.save_pretrained(folder, state_dict=state_dict, **kwargs)
