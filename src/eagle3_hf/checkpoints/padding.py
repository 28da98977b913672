"""Padding a draft's width for hardware that wants aligned sizes (2880 -> 3072); the padded draft computes the same.

The new lanes are zero and stay zero: every matrix that writes them has zero rows, every one that reads them zero
columns. Two things need care. Where several vectors are joined (`fc` reads n states, q/k/v read embedding and state),
each one is padded, so the padding lies inside the matrix and not at its end. And the norms must still average over
the real lanes only.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from ..modeling_eagle3 import Eagle3DraftModel


def pad_segments(tensor: torch.Tensor, dim: int, segments: int, size: int) -> torch.Tensor:
    """Pad each of the `segments` equal parts of `tensor` along `dim` with zeros to `size`.

    Raises:
        ValueError: the length isn't a multiple of `segments`, or a part is longer than `size`.
    """
    length = tensor.shape[dim]
    if length % segments:
        raise ValueError(f"dimension {dim} of length {length} can't be cut into {segments} equal segments")
    part = length // segments
    if part > size:
        raise ValueError(f"a segment of length {part} doesn't fit into {size}")
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [segments, part]
    filled = list(shape)
    filled[dim + 1] = size
    made = tensor.new_zeros(filled)
    made.narrow(dim + 1, 0, part).copy_(tensor.reshape(shape))
    return made.flatten(dim, dim + 1)


def unpad_segments(tensor: torch.Tensor, dim: int, segments: int, size: int) -> torch.Tensor:
    """Undo [`pad_segments`]: keep the first `size` of each of the `segments` parts."""
    shape = list(tensor.shape)
    shape[dim : dim + 1] = [segments, tensor.shape[dim] // segments]
    return tensor.reshape(shape).narrow(dim + 1, 0, size).flatten(dim, dim + 1)


def _plan(name: str, num_aux: int) -> list[tuple[int, int, str]]:
    """How a tensor grows: `(dim, segments, which width)`, for each of its dimensions that does."""
    kind = name.rpartition(".")[0].rpartition(".")[2]
    bias = name.endswith(".bias")
    if kind == "fc":
        return [(0, 1, "draft")] if bias else [(0, 1, "draft"), (1, num_aux, "target")]
    if kind == "input_norm":
        return [(0, num_aux, "target")]
    if name.startswith("fc_norm."):
        return [(0, 1, "target")]
    if kind in {"q_proj", "k_proj", "v_proj"}:
        # Only the first layer reads embedding and state; the rows are heads, which don't grow.
        return [] if bias else [(1, 2 if name.startswith("layers.0.") else 1, "draft")]
    if kind in {"gate_proj", "up_proj"}:
        return [] if bias else [(1, 1, "draft")]
    if kind in {"o_proj", "down_proj"}:
        return [(0, 1, "draft")]
    if kind in {"lm_head", "embed_tokens"}:
        return [(1, 1, "draft")]
    if kind in {"norm", "input_layernorm", "hidden_norm", "post_attention_layernorm"}:
        return [(0, 1, "draft")]
    return []  # q_norm and k_norm are as wide as a head; d2t and t2d are vocabularies


def pad_state_dict(
    state: dict[str, torch.Tensor], num_aux: int, hidden_size: int, target_hidden_size: int | None = None
) -> dict[str, torch.Tensor]:
    """A draft's tensors, padded to a larger width.

    Args:
        state: tensors by this package's names.
        num_aux: states that `fc` reads.
        hidden_size: new width of the draft.
        target_hidden_size: new width of each of those states; default: `hidden_size`.

    Raises:
        ValueError: the new width is smaller than the present one.
    """
    widths = {"draft": hidden_size, "target": target_hidden_size or hidden_size}
    made = {}
    for name, tensor in state.items():
        for dim, segments, which in _plan(name, num_aux):
            tensor = pad_segments(tensor, dim, segments, widths[which])
        made[name] = tensor
    return made


def unpad_state_dict(
    state: dict[str, torch.Tensor], num_aux: int, hidden_size: int, target_hidden_size: int | None = None
) -> dict[str, torch.Tensor]:
    """Undo [`pad_state_dict`]; `hidden_size` and `target_hidden_size` are the real widths."""
    widths = {"draft": hidden_size, "target": target_hidden_size or hidden_size}
    made = {}
    for name, tensor in state.items():
        for dim, segments, which in _plan(name, num_aux):
            tensor = unpad_segments(tensor, dim, segments, widths[which])
        made[name] = tensor
    return made


class PaddedRMSNorm(nn.Module):
    """RMSNorm over padded vectors: the mean square is that of the real lanes.

    Args:
        weight: `[segments * padded]`, zero in the padding.
        eps: as in the norm it replaces.
        real: real lanes of each segment.
        segments: padded vectors that the input joins.
    """

    def __init__(self, weight: torch.Tensor, eps: float, real: int, segments: int = 1):
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.variance_epsilon, self.real, self.segments = eps, real, segments

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        lanes = unpad_segments(wide, wide.dim() - 1, self.segments, self.real)
        wide = wide * torch.rsqrt(lanes.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, real={self.segments}x{self.real}, eps={self.variance_epsilon}"


def pad_draft(draft: Eagle3DraftModel, hidden_size: int, target_hidden_size: int | None = None) -> Eagle3DraftModel:
    """A copy of `draft` of a larger width that gives the same logits for padded inputs.

    Its features are to be padded with `pad_segments(x, -1 % x.dim(), n_aux, target_hidden_size)`, embeddings (unless
    it brings its own) and recurrent states with one segment. It is meant for compiled targets that are padded too, so
    it doesn't fit an unpadded target.

    Raises:
        ValueError: the new width is smaller than the present one.
    """
    old = draft.config
    target_hidden_size = target_hidden_size or hidden_size
    config = copy.deepcopy(old)
    # head_dim is explicit in the config already, so the heads stay as they are.
    config.hidden_size, config.target_hidden_size = hidden_size, target_hidden_size
    if hidden_size != target_hidden_size and not old.use_aux_hidden_state:
        raise ValueError(
            f"hidden_size {hidden_size} and target_hidden_size {target_hidden_size} need an fc between them"
        )
    if hidden_size != target_hidden_size and not old.own_embeddings:
        raise ValueError(f"hidden_size {hidden_size} and target_hidden_size {target_hidden_size} need own embeddings")
    state = pad_state_dict(draft.state_dict(), old.num_aux_hidden_states, hidden_size, target_hidden_size)
    made = type(draft)(config).to(draft.lm_head.weight)
    made.load_state_dict(state)
    for name, module in list(made.named_modules()):
        if not name.rpartition(".")[2].endswith("norm") and not name.startswith("fc_norm."):
            continue
        plan = _plan(f"{name}.weight", old.num_aux_hidden_states)
        if plan and not isinstance(module, (nn.Identity, nn.ModuleList)):
            _, segments, which = plan[0]
            real = old.hidden_size if which == "draft" else old.target_hidden_size
            norm = PaddedRMSNorm(module.weight.detach().clone(), module.variance_epsilon, real, segments)
            parent, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(parent), leaf, norm)
    made.generation_config = copy.deepcopy(draft.generation_config)
    return made.train(draft.training)
