"""Static trees: a shape given once, and the index tensors that drafting along it needs."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .tree import from_parents


@dataclass
class StaticShape:
    """A static tree's shape, level by level.

    Attributes:
        ranks: for each level, the child rank (0 is the draft's best) of each of its nodes.
        parents: for each level, the index of each node's parent among the nodes of the level above.
        expanded: for each level, the nodes that have children, as indices into that level.
    """

    ranks: list[list[int]]
    parents: list[list[int]]
    expanded: list[list[int]]


def static_shape(paths: Sequence[Sequence[int]]) -> StaticShape:
    """Read a static tree given as child-rank paths.

    Args:
        paths: each a non-empty sequence of ranks from the root down, e.g. `[(0,), (1,), (0, 0)]`.

    Raises:
        ValueError: something else than ranks, no path, a negative rank, a path given twice, or one whose parent
            isn't listed.
    """
    try:
        listed = [tuple(map(operator.index, path)) for path in paths]
    except TypeError:
        raise ValueError(
            f"tree_paths must be paths of child ranks, as in [(0,), (1,), (0, 0)], got {paths!r}"
        ) from None
    if not listed or not all(listed):
        raise ValueError("tree_paths needs at least one path, and none may be empty")
    if len(set(listed)) != len(listed):
        raise ValueError("tree_paths holds a path twice")
    if any(rank < 0 for path in listed for rank in path):
        raise ValueError("tree_paths holds a negative child rank")
    levels: list[list[tuple[int, ...]]] = [[()]]
    for depth in range(1, max(map(len, listed)) + 1):
        levels.append(sorted(path for path in listed if len(path) == depth))
    shape = StaticShape([], [], [])
    for above, level in itertools.pairwise(levels):
        place = {path: i for i, path in enumerate(above)}
        orphans = [path for path in level if path[:-1] not in place]
        if orphans:
            raise ValueError(f"tree_paths lists {orphans[0]} but not its parent {orphans[0][:-1]}")
        shape.ranks.append([path[-1] for path in level])
        shape.parents.append([place[path[:-1]] for path in level])
    for level, below in itertools.pairwise([*levels[1:], []]):
        parents = {path[:-1] for path in below}
        shape.expanded.append([i for i, path in enumerate(level) if path in parents])
    return shape


@dataclass
class StaticLevel:
    """Index tensors of one level of a static tree, on the draft's device.

    Attributes:
        width: how many best tokens are needed of each node above.
        source: int64 `[n]`, the row of the logits above that each node's token comes from.
        rank: int64 `[n]`, which of the best tokens there.
        parent: int64 `[n]`, each node's parent among the level above.
        expanded: int64 `[m]`, nodes that have children.
        ancestry: bool `[1, m, scratch]`, which of the expanded nodes so far each of these sees; the last `m` are they.
        scratch_depths: int64 `[scratch]`, depths of the expanded nodes so far, below the root's children.
    """

    width: int
    source: torch.Tensor
    rank: torch.Tensor
    parent: torch.Tensor
    expanded: torch.Tensor
    ancestry: torch.Tensor
    scratch_depths: torch.Tensor


def static_levels(shape: StaticShape, device: torch.device) -> list[StaticLevel]:
    """The levels of `shape`, root's children first."""
    levels = []
    sources, ancestry = [0], torch.zeros(1, 0, dtype=torch.bool)
    depths: list[int] = []
    for level, (ranks, parents, expanded) in enumerate(zip(shape.ranks, shape.parents, shape.expanded)):
        source = [sources.index(parent) for parent in parents]
        own = torch.eye(len(expanded), dtype=torch.bool)
        ancestry = torch.cat((ancestry[[source[node] for node in expanded]], own), dim=1)
        depths = depths + [level] * len(expanded)
        levels.append(
            StaticLevel(
                width=max(ranks) + 1,
                source=_index(source, device),
                rank=_index(ranks, device),
                parent=_index(parents, device),
                expanded=_index(expanded, device),
                ancestry=ancestry[None].to(device),
                scratch_depths=_index(depths, device),
            )
        )
        sources = expanded
    return levels


def static_nodes(
    shape: StaticShape, depth: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Parents `[nodes]`, depths `[nodes]` and ancestors `[nodes, nodes]` of the first `depth` levels, root included.

    Returns:
        As in [`DraftTree`], for one row, and the depths as a list.
    """
    parents, depths, first, listed = [0], [0], 0, 1
    for level, of in enumerate(shape.parents[:depth], start=1):
        parents += [first + parent for parent in of]
        depths += [level] * len(of)
        first, listed = listed, listed + len(of)
    line = _index(depths, device)[None]
    tree = from_parents(torch.zeros_like(line), _index(parents, device)[None], line, max_depth=depths[-1])
    return tree.parents[0], tree.depths[0], tree.ancestors[0], depths


def _index(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).to(device)
