"""Rejection sampling with several candidates: the children of a tree node that were drawn from the draft.

Children are tried one after the other (SpecInfer, arXiv 2305.09781): each is kept with probability `min(1, p/q)`, and
each that isn't leaves the residual `(p - q)+` as the new `p`. Children drawn without replacement (Sequoia,
arXiv 2402.12374) take their token out of `q` too. When no child is kept, the token comes from what is left of `p`.
Either way the node's token is distributed as `p`.
"""

from __future__ import annotations

import torch

from .rejection import race, remove_token, residual
from .tree import DraftTree


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _drawable(q: torch.Tensor, child: torch.Tensor) -> torch.Tensor:
    """Whether `child` is a token that can come from `q`: with probability zero it would pass the test as p/0."""
    return (child >= 0) & (q.gather(-1, child.clamp(min=0)[..., None])[..., 0] > 0)


def reject_child(
    p: torch.Tensor, q: torch.Tensor | None, child: torch.Tensor, replacement: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What is left of `p` and `q` after one child wasn't kept.

    Args:
        p: float32 `[..., vocab]`, normalised.
        q: the same, what the child was drawn from; `None` for a deterministic draft.
        child: int64 `[...]`, its token; -1, or a token that `q` never gives, changes nothing.
        replacement: whether the next child is drawn from the same `q` again.

    Returns:
        The new `p` and `q`, normalised.
    """
    if q is None:
        return torch.where((child >= 0)[..., None], _normalised(remove_token(p, child)), p), None
    there = _drawable(q, child)[..., None]
    left = torch.where(there, _normalised(residual(p, q)), p)
    if not replacement:
        # All of q may be used up, and then it stays zero: no further child can have been drawn.
        vocab = torch.arange(q.shape[-1], device=q.device)
        q = torch.where(there, _normalised(torch.where(vocab == child[..., None], 0.0, q)), q)
    return left, q


def accept_children(
    target_probs: torch.Tensor,
    children: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
    exponentials: torch.Tensor,
    replacement: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose one token at each node.

    Args:
        target_probs: float32 `[..., vocab]`, the target's distribution, all processing done.
        children: int64 `[..., C]`, drafted tokens in the order they were drawn; -1 for none. One that can't have been
            drawn (its `q` is zero, as when more are listed than `q` has tokens) counts as none.
        draft_probs: float32 `[..., vocab]`, what the first child was drawn from; `None` for a deterministic draft.
        uniforms: float32 `[..., C]` in `[0, 1)`.
        exponentials: float32 `[..., vocab]`, unit-rate.
        replacement: children were drawn independently of each other, so that one may come twice; else without
            replacement: each from `draft_probs` without the ones before it, normalised.

    Returns:
        int64 `[...]` tokens, and int64 `[...]` which child that is, -1 when none was kept.

    Raises:
        ValueError: random numbers of another shape, which would broadcast: nodes or tokens would share them.
    """
    nodes = torch.broadcast_shapes(target_probs.shape[:-1], children.shape[:-1])
    for name, given, last in (("uniforms", uniforms, children), ("exponentials", exponentials, target_probs)):
        if given.shape != (*nodes, last.shape[-1]):
            raise ValueError(f"{name} must be {[*nodes, last.shape[-1]]}, got {list(given.shape)}")
    p, q = target_probs, draft_probs
    open_ = torch.ones_like(children[..., 0], dtype=torch.bool)
    taken = torch.full_like(children[..., 0], -1)
    for i in range(children.shape[-1]):
        child = children[..., i]
        at = child.clamp(min=0)[..., None]
        offered = 1.0 if q is None else q.gather(-1, at)[..., 0]
        there = child >= 0 if q is None else _drawable(q, child)
        keep = (uniforms[..., i] * offered < p.gather(-1, at)[..., 0]) & there & open_
        taken = torch.where(keep, i, taken)
        open_ = open_ & ~keep
        # Where a child was kept before, p isn't read any more.
        p, q = reject_child(p, q, child, replacement)
    drawn = race(p, exponentials)
    kept = children.gather(-1, taken.clamp(min=0)[..., None])[..., 0]
    return torch.where(taken >= 0, kept, drawn), taken


def children_of(tree: DraftTree, width: int) -> torch.Tensor:
    """Tokens of every node's children in tree order, int64 `[batch, nodes, width]`, -1 where there are fewer.

    Args:
        tree: the proposal.
        width: most children a node has; further ones are left out.
    """
    batch, nodes = tree.tokens.shape
    device = tree.tokens.device
    node = torch.arange(nodes, device=device)
    siblings = (tree.parents[:, :, None] == tree.parents[:, None, :]) & (node[:, None] > node) & (node > 0)
    rank = siblings.sum(dim=2)
    # The root is nobody's child and what exceeds the width has no place: both go to a slot that is cut off.
    place = torch.where((node > 0) & (rank < width), tree.parents * width + rank, nodes * width)
    table = tree.tokens.new_full((batch, nodes * width + 1), -1)
    return table.scatter(1, place, tree.tokens)[:, :-1].view(batch, nodes, width)


def select_sampled(
    tree: DraftTree,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    width: int = 1,
    uniforms: torch.Tensor | None = None,
    exponentials: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token after each node of a tree (or chain) whose children were sampled; `verification.accept` then walks.

    Siblings must be drawn without replacement and stand in the order of their drawing. The tokens of one node differ
    then, so "the drawn token is a child" and "the child was kept" are the same.

    Args:
        tree: the proposal.
        target_probs: float32 `[batch, nodes, vocab]`.
        draft_probs: float32 `[batch, nodes, vocab]`, what each node's first child was drawn from; leaves: anything.
        width: most children a node has; 1 for a chain.
        uniforms: float32 `[batch, nodes, width]`; drawn when `None`.
        exponentials: float32 `[batch, nodes, vocab]`; drawn when `None`.

    Returns:
        int64 `[batch, nodes]`.
    """
    if uniforms is None:
        uniforms = torch.rand(*target_probs.shape[:-1], width, device=target_probs.device)
    if exponentials is None:
        exponentials = -torch.log1p(-torch.rand_like(target_probs))
    children = children_of(tree, width)
    return accept_children(target_probs, children, draft_probs, uniforms, exponentials)[0]
