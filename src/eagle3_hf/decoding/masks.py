"""Attention masks over a SpeculativeCache: the past of each row, then the new nodes by ancestry."""

from __future__ import annotations

from typing import Any

import torch

from ..attention import NAME


def visibility(
    lengths: torch.Tensor,
    used: int,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    is_chain: bool,
    node_offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What each new node may see, and the position of each key.

    Slot `j` of row `b` holds position `j` of its past while `j < lengths[b]`; from there on slot `lengths[b] + m` is
    node `m`.

    Args:
        lengths: int64 `[batch]`, committed slots of each row.
        used: keys the attention sees.
        depths: int64 `[batch, nodes]` of all nodes written past the committed length so far.
        ancestors: bool `[batch, queries, nodes]`.
        is_chain: node `m` is at depth `m`.
        node_offset: first of the nodes that are queries (chains only).

    Returns:
        bool `[batch, queries, used]`, and int64 `[batch, used]` key positions.
    """
    slots = torch.arange(used, device=lengths.device)
    relative = slots[None, :] - lengths[:, None]
    queries, nodes = ancestors.shape[1], ancestors.shape[2]
    if is_chain:
        own = torch.arange(node_offset, node_offset + queries, device=lengths.device)
        return relative[:, None, :] <= own[None, :, None], slots.expand(lengths.shape[0], -1)
    node = relative.clamp(0, nodes - 1)
    in_tree = (relative >= 0) & (relative < nodes)
    seen = ancestors.gather(2, node[:, None, :].expand(-1, queries, -1)) & in_tree[:, None, :]
    positions = torch.where(in_tree, lengths[:, None] + depths.gather(1, node), slots[None, :])
    return seen | (relative < 0)[:, None, :], positions


def finish(visible: torch.Tensor, implementation: str | None, dtype: torch.dtype) -> torch.Tensor:
    """A `[batch, queries, keys]` bool mask in the form an attention implementation takes, `[batch, 1, ...]`."""
    mask = visible[:, None]
    if implementation in (None, "eager"):
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    return mask


class TargetMasks:
    """Builds the mask (or dict of masks) that a target family expects.

    Args:
        config: the target's text config.

    Raises:
        ValueError: the attention implementation takes no explicit mask.
    """

    def __init__(self, config: Any, dtype: torch.dtype):
        self.implementation = getattr(config, "_attn_implementation", None)
        # Our own name is seen when another thread is generating with the same model.
        if self.implementation not in (None, "eager", "sdpa", NAME):
            raise ValueError(
                f"speculation passes explicit attention masks, which attn_implementation={self.implementation!r} "
                "doesn't take: load the target with attn_implementation='sdpa' (or 'eager')"
            )
        self.dtype = dtype
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        self.kinds = sorted(set(kinds))
        self.window = getattr(config, "sliding_window", None)
        self.chunk = getattr(config, "attention_chunk_size", None)

    @property
    def full_only(self) -> bool:
        """Whether every layer sees the whole past."""
        return self.kinds == ["full_attention"]

    def build(self, visible: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor) -> Any:
        """Masks for one forward.

        Args:
            visible: bool `[batch, queries, keys]`.
            query_positions: int64 `[batch, queries]`.
            key_positions: int64 `[batch, keys]`.
        """
        made = {}
        for kind in self.kinds:
            allowed = visible
            if kind == "sliding_attention" and self.window is not None:
                allowed = visible & (query_positions[:, :, None] - key_positions[:, None, :] < self.window)
            elif kind == "chunked_attention" and self.chunk is not None:
                same = query_positions[:, :, None] // self.chunk == key_positions[:, None, :] // self.chunk
                allowed = visible & same
            made[kind] = finish(allowed, self.implementation, self.dtype)
        return made if len(made) > 1 else made[self.kinds[0]]
