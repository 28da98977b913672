"""The target as a teacher: one forward gives aux states, final states and, where wanted, its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..attention import grouped_attention
from ..aux_layers import AuxCapture, check_aux_layers, default_aux_layers, find_decoder, text_config
from ..decoding.masks import TargetMasks
from .packing import visible

KINDS = ("hidden", "topk", "logits")


@dataclass
class TeacherStates:
    """What [`TargetTeacher`] returns for `[B, T]` tokens; `M` is the number of positions whose next token is learned.

    Attributes:
        aux: `[B, T, n_aux * Ht]`, inputs of the aux layers, in the order of the ids.
        hidden: `[B, T, Ht]`, what the target's head reads: the last state after its final norm.
        needed: bool `[B, T]`, the `M` positions, those before a token of the loss mask.
        argmax: int64 `[B, T]`, the target's first choice for the next token; -1 where it isn't needed.
        logits: `[M, V]` with kind `logits`.
        top_logprobs, top_ids: float32 and int64 `[M, k]`, descending, with kind `topk`.
    """

    aux: torch.Tensor
    hidden: torch.Tensor
    needed: torch.Tensor
    argmax: torch.Tensor
    logits: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None


def needed_positions(loss_mask: torch.Tensor, document_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Bool `[B, T]`: the next token, in the same document, is to be learned."""
    needed = torch.nn.functional.pad(loss_mask[:, 1:].bool(), (0, 1))
    if document_ids is not None:
        needed[:, :-1] &= document_ids[:, 1:] == document_ids[:, :-1]
    return needed


class TargetTeacher:
    """Runs the target over finished texts.

    Args:
        model: a decoder-only causal LM, in eval mode.
        aux_layers: ids of the aux states (see `aux_layers.py`); default `(2, L//2, L-3)`.
        kind: `hidden` (the head is applied again in training), `topk` or `logits`.
        top_k: with `topk`, how many.
        layers_attribute: dotted path to the decoder layers, where they aren't found by name.

    Raises:
        ValueError: an unknown kind, ids outside the model, a `top_k` that doesn't fit.
    """

    def __init__(
        self,
        model: Any,
        aux_layers: Sequence[int] | None = None,
        kind: str = "hidden",
        top_k: int = 0,
        layers_attribute: str | None = None,
    ):
        config = text_config(model)
        if kind not in KINDS:
            raise ValueError(f"a teacher is one of {', '.join(KINDS)}; got {kind!r}")
        if (kind == "topk") != (0 < top_k <= config.vocab_size):
            raise ValueError(
                f"teacher topk needs 1..{config.vocab_size} tokens, others none; got {kind!r} with {top_k}"
            )
        self.model, self.kind, self.top_k = model, kind, top_k
        count = config.num_hidden_layers
        given = default_aux_layers(count) if aux_layers is None else aux_layers
        self.aux_layers = check_aux_layers(given, count)
        self.capture = AuxCapture(*find_decoder(model, layers_attribute), self.aux_layers)
        self.head: nn.Module = model.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings: pass a causal language model")
        self.vocab_size, self.hidden_size = config.vocab_size, config.hidden_size
        self._checked = kind != "hidden"

    @torch.no_grad()
    def __call__(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> TeacherStates:
        """One forward.

        Args:
            input_ids: int64 `[B, T]`, right-padded.
            loss_mask: bool `[B, T]`.
            document_ids, position_ids: int64 `[B, T]` of packed rows, see `packing.layout`.

        Raises:
            ValueError: kind `hidden`, and the target's logits aren't its head times the final state.
        """
        needed = needed_positions(loss_mask, document_ids)
        seen: dict[str, torch.Tensor] = {}

        def only_needed(module: nn.Module, args: tuple) -> tuple:
            # The head costs much and its logits are large. What the model does to the logits afterwards (scaling,
            # softcapping) is elementwise and happens to the chosen rows as it would to all.
            seen["hidden"] = args[0]
            rows = args[0][needed.to(args[0].device)][None]
            return (rows if rows.shape[1] else args[0][:1, :1], *args[1:])

        kwargs: dict[str, Any] = {}
        # Right padding needs no mask: causal attention keeps it from real tokens.
        if document_ids is not None:
            assert position_ids is not None
            masks = TargetMasks(text_config(self.model), self.model.dtype)
            kwargs["attention_mask"] = masks.build(visible(document_ids), position_ids, position_ids)
            kwargs["position_ids"] = position_ids
        hook = self.head.register_forward_pre_hook(only_needed)
        try:
            with self.capture, grouped_attention(self.model):
                out = self.model(input_ids=input_ids, use_cache=False, return_dict=True, **kwargs)
            states = self.capture.take()
        finally:
            hook.remove()
        hidden, count = seen["hidden"], int(needed.sum())
        logits = out.logits[0, :count]
        if not self._checked and count:
            self._check(hidden[needed.to(hidden.device)][:16], logits[:16])
        argmax = torch.full(input_ids.shape, -1, dtype=torch.long, device=logits.device)
        argmax[needed.to(argmax.device)] = logits.argmax(-1)
        made = TeacherStates(torch.cat([s.to(hidden.device) for s in states], -1), hidden, needed, argmax)
        if self.kind == "logits":
            made.logits = logits
        elif self.kind == "topk":
            # In pieces: a float32 copy of all logits would be the largest tensor by far.
            parts = [part.float().log_softmax(-1).topk(self.top_k, dim=-1) for part in logits.split(256)]
            made.top_logprobs = torch.cat([part.values for part in parts])
            made.top_ids = torch.cat([part.indices for part in parts])
        return made

    def _check(self, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        expected = hidden.float() @ self.head.weight.float().t()
        scale = float(expected.abs().max())
        error = float((expected - logits.float()).abs().max())
        if error > scale * (1e-3 if logits.dtype == torch.float32 else 3e-2) + 1e-6:
            raise ValueError(
                f"{type(self.model).__name__} changes its logits after the head (a bias, scaling or softcapping): its "
                "final states alone don't give its distribution; use teacher topk:K or logits"
            )
        self._checked = True
