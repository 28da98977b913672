"""The training-time test written the straightforward way: what tests compare with and what the benchmark beats.

Full masks, keys of all steps concatenated, all scores and all logits in fp32, log-softmax by autograd. It takes the
memory that [`training_time_test`] avoids. Chunks, merges, short cuts and in-place gradients have no place here.
"""

from __future__ import annotations

from typing import cast

import torch

from ..draft_layers import AttendingMemory, Eagle3Attention
from ..modeling_eagle3 import Eagle3DraftModel


class _FullMask(AttendingMemory):
    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor], visible: torch.Tensor):
        self.keys, self.values, self.visible = keys, values, visible

    def attend(
        self, attention: Eagle3Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        self.keys.append(key)
        self.values.append(value)
        groups = query.shape[1] // key.shape[1]
        keys = torch.cat(self.keys, dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat(self.values, dim=2).repeat_interleave(groups, dim=1)
        scores = (query @ keys.transpose(2, 3)).float() * attention.scaling
        scores = scores.masked_fill(~self.visible[:, None], float("-inf"))
        return (scores.softmax(-1).to(values.dtype) @ values).transpose(1, 2)


def step_mask(documents: torch.Tensor, step: int) -> torch.Tensor:
    """Bool `[B, T, T * (step + 1)]`: causal within the document over step 0, the diagonal of each later step.

    `documents`: int64 `[B, T]`, a number for each document, ascending.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    causal = causal & (documents[:, :, None] == documents[:, None, :])
    own = torch.eye(length, dtype=torch.bool, device=documents.device).expand(len(documents), -1, -1)
    return torch.cat([causal, *[own] * step], dim=2)


def reference_losses(
    draft: Eagle3DraftModel,
    features: torch.Tensor,
    embeds: torch.Tensor,
    loss_mask: torch.Tensor,
    teacher_logits: torch.Tensor,
    teacher_argmax: torch.Tensor,
    *,
    documents: torch.Tensor | None = None,
    steps: int = 4,
    loss: str = "soft_cross_entropy",
    mass: str = "vocabulary",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each step's mean loss, and the logits of every slot.

    Args:
        draft: without dropout.
        features: `[B, T, n_aux * Ht]`.
        embeds: `[B, T, H]`, of the tokens.
        loss_mask: bool `[B, T]`.
        teacher_logits: `[B, T, V]`, over the target's whole vocabulary.
        teacher_argmax: int64 `[B, T]`.
        documents: int64 `[B, T]`, a number for each document of a row, ascending; `None`: one.
        steps, loss, mass: as for `training_time_test`; one name only.

    Returns:
        `[steps]` and `[steps, B, T, Vd]`.
    """
    length, device = loss_mask.shape[1], loss_mask.device
    documents = torch.zeros_like(teacher_argmax) if documents is None else documents
    slot = torch.arange(length, device=device)
    start = (documents[:, :, None] == documents[:, None, :]).int().argmax(-1)
    position = slot - start
    kept = draft.draft_to_target(torch.arange(draft.config.draft_vocab_size, device=device))
    log_p = teacher_logits.float().log_softmax(-1)[..., kept]
    if mass == "vocabulary":
        log_p = log_p.log_softmax(-1)
    hidden = draft.fuse(features)
    keys: list[list[torch.Tensor]] = [[] for _ in draft.layers]
    values: list[list[torch.Tensor]] = [[] for _ in draft.layers]
    losses, all_logits = [], []
    for k in range(steps):
        at = (slot + 1 + k).clamp(max=length - 1)
        rope = draft.rotary_emb(hidden, position + k)
        visible = step_mask(documents, k)
        for layer, layer_keys, layer_values in zip(draft.layers, keys, values):
            hidden = layer(embeds[:, at], hidden, rope, None, _FullMask(layer_keys, layer_values, visible))
        logits = cast(torch.Tensor, draft.head(hidden, 0).logits).float()
        predicted = (slot + 2 + k).clamp(max=length - 1)
        real = (slot + 2 + k < length) & (documents[:, predicted] == documents)
        learn = real & loss_mask[:, predicted]
        if mass == "vocabulary":
            learn = learn & draft.t2d[teacher_argmax[:, at]]
        value = plain_loss(loss, log_p[:, at], logits.log_softmax(-1))
        losses.append(torch.where(learn, value, torch.zeros_like(value)).sum() / learn.sum().clamp(min=1))
        all_logits.append(logits)
        hidden = draft.head(hidden, None).last_hidden_state
    return torch.stack(losses), torch.stack(all_logits)


def plain_loss(name: str, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """A loss from its formula, `[..., V]` log-probabilities to `[...]`."""
    p, q = log_p.exp(), log_q.exp()
    if name == "soft_cross_entropy":
        return -(p * log_q).sum(-1)
    if name == "kl":
        return (p * (log_p - log_q)).sum(-1)
    if name == "reverse_kl":
        return (q * (log_q - log_p)).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    if name == "total_variation":
        return 1 - accepted
    if name == "log_acceptance":
        return -accepted.log()
    raise ValueError(f"no such loss: {name!r}")
