"""Selection and acceptance: one rule for chains and trees, greedy and sampled.

For a deterministic draft (q is one at each proposed token), rejection sampling with several candidates is the same
distribution as drawing one token from the processed target distribution at every node and walking down while the
drawn token is among the node's children: in both, child `c` is taken with probability `p(c)`, and what comes out when
no child matches is distributed as `p` without the children. Greedy is the same walk with argmax for the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .tree import DraftTree


@dataclass
class Acceptance:
    """Outcome of one verification.

    Attributes:
        counts: int64 `[batch]`, accepted draft tokens of each row (the root not counted).
        path: int64 `[batch, max_depth + 1]`, accepted nodes from the root down; past `counts` the last one repeats.
        tokens: int64 `[batch, max_depth + 1]`, new tokens: accepted ones, then the bonus token at `counts`; entries
            past it mean nothing.
    """

    counts: torch.Tensor
    path: torch.Tensor
    tokens: torch.Tensor


def select_tokens(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """One token for each node: the argmax, or a draw from `softmax(scores)`.

    Args:
        scores: float32 `[..., vocab]`, processed logits.
        do_sample: draw instead of argmax.

    Returns:
        int64 `[...]`.
    """
    if not do_sample:
        return scores.argmax(dim=-1)
    flat = scores.reshape(-1, scores.shape[-1]).softmax(dim=-1)
    return torch.multinomial(flat, num_samples=1).view(scores.shape[:-1])


def accept(tree: DraftTree, selected: torch.Tensor) -> Acceptance:
    """Walk each row's tree along the selected tokens.

    Args:
        tree: the proposal.
        selected: int64 `[batch, nodes]`, the target's token after each node.
    """
    if tree.is_chain:
        matches = tree.tokens[:, 1:] == selected[:, :-1]
        if tree.counted is not None:
            matches = matches & tree.counted[:, 1:]
        counts = matches.long().cumprod(dim=1).sum(dim=1)
        path = torch.minimum(tree.depths, counts[:, None])
        return Acceptance(counts, path, selected)
    matches = tree.tokens == selected.gather(1, tree.parents)
    matches[:, 0] = True
    if tree.counted is not None:
        matches = matches & tree.counted
    # A node is reached when no ancestor of it mismatches; children of one node differ, so reached nodes form a path.
    reached = ~(tree.ancestors & ~matches[:, None, :]).any(dim=2)
    depth = torch.where(reached, tree.depths, -1)
    counts, deepest = depth.max(dim=1)
    width = tree.max_depth + 1
    levels = torch.arange(width, device=depth.device)
    at_level = depth[:, None, :] == levels[None, :, None]
    path = torch.where(levels[None] <= counts[:, None], at_level.long().argmax(dim=2), deepest[:, None])
    return Acceptance(counts, path, selected.gather(1, path))
