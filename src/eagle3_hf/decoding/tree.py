"""DraftTree: what a draft proposes, batched; chains, dynamic trees (EAGLE-2/3) and static trees are one thing."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class DraftTree:
    """Proposed tokens of each row; node 0 is the root, the last committed token. Parents come before children.

    Attributes:
        tokens: int64 `[batch, nodes]`.
        parents: int64 `[batch, nodes]`; the root's is 0.
        depths: int64 `[batch, nodes]`; the root's is 0.
        ancestors: bool `[batch, nodes, nodes]`, `[b, n, m]` True where `m` is `n` or one of its ancestors.
        max_depth: the deepest level any node has.
        is_chain: node `n` is at depth `n` in every row, with parent `n - 1`.
        draft_probs: float32 `[batch, nodes, vocab]`, what each node's child was drawn from, over the target's
            vocabulary; zeros where there is none. `None` for drafts that weren't drawn.
        depth_list: `depths` of a row on the host, where they are the same in every row; else `None`.
        counted: bool `[batch, nodes]`, False for nodes that mustn't be accepted, whose descendants are False too.
            `None` where all may be.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    max_depth: int
    is_chain: bool = False
    draft_probs: torch.Tensor | None = None
    depth_list: list[int] | None = None
    counted: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """Nodes of each row, root included."""
        return self.tokens.shape[1]

    def node_at_depth(self) -> torch.Tensor:
        """int64 `[batch, nodes, max_depth + 1]`: the ancestor of each node at each depth; the node itself below it."""
        nodes = torch.arange(self.size, device=self.tokens.device)
        found = nodes[None, :, None].expand(self.tokens.shape[0], -1, self.max_depth + 1).clone()
        depth = self.depths[:, None, :].expand_as(self.ancestors)
        # Entries that are no ancestors write the node to its own depth, where it belongs anyway.
        depth = torch.where(self.ancestors, depth, self.depths[:, :, None])
        source = torch.where(self.ancestors, nodes[None, None, :], nodes[None, :, None])
        return found.scatter_(2, depth, source)


def chain(tokens: torch.Tensor) -> DraftTree:
    """A chain: `tokens` is int64 `[batch, 1 + K]`, root first."""
    batch, size = tokens.shape
    device = tokens.device
    depths = torch.arange(size, device=device)
    ancestors = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    return DraftTree(
        tokens=tokens,
        parents=(depths - 1).clamp(min=0).expand(batch, -1),
        depths=depths.expand(batch, -1),
        ancestors=ancestors.expand(batch, -1, -1),
        max_depth=size - 1,
        is_chain=True,
        depth_list=list(range(size)),
    )


def from_parents(tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, max_depth: int) -> DraftTree:
    """A tree from int64 `[batch, nodes]` tokens, parents and depths (see [`DraftTree`] for their meaning)."""
    batch, size = tokens.shape
    own = torch.eye(size, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
    ancestors = own
    index = parents[:, :, None].expand(-1, -1, size)
    for _ in range(max_depth):
        ancestors = own | ancestors.gather(1, index)
    return DraftTree(tokens, parents, depths, ancestors, max_depth)


def under_roots(
    roots: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, max_depth: int
) -> DraftTree:
    """A tree of `roots` `[batch]` and drafted nodes `[batch, nodes]` under them, on the roots' device."""
    root = torch.zeros_like(roots[:, None])

    def whole(first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return torch.cat((first, rest.to(roots.device)), 1)

    return from_parents(whole(roots[:, None], tokens), whole(root, parents), whole(root, depths), max_depth)


def best_nodes(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, scores: torch.Tensor, keep: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `keep` best-scored candidates of each row, in tree order, parents renumbered (EAGLE-2's reranking).

    Scores are cumulative log-probabilities, so a child never beats its parent, and candidates are listed parents
    first: a stable sort therefore never keeps a node without its ancestors.

    Args:
        tokens, parents, depths: int64 `[batch, candidates]`; `parents` is -1 for children of the root, else the
            parent's index among the candidates.
        scores: float `[batch, candidates]`.
        keep: nodes to keep.

    Returns:
        Tokens, parents (0 is the root, candidate `i` kept at place `j` is `j + 1`), depths and scores, each
        `[batch, keep]`.
    """
    keep = min(keep, tokens.shape[1])
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
    place = torch.zeros_like(tokens).scatter_(
        1, chosen, torch.arange(1, keep + 1, device=tokens.device).expand(tokens.shape[0], -1)
    )
    old_parents = parents.gather(1, chosen)
    new_parents = torch.where(old_parents < 0, 0, place.gather(1, old_parents.clamp(min=0)))
    return tokens.gather(1, chosen), new_parents, depths.gather(1, chosen), scores.gather(1, chosen)
