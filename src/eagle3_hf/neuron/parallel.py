"""Tensor parallelism inside the graphs: the two collectives, and tables over a vocabulary that is split.

All ranks run the same graph; which part a rank holds, it reads from the int32 tensor `rank` among its weights, so no
rank is a constant in a graph. Matrices are split as `checkpoints.sharding` does: what o and down projections write is
summed over the ranks, states and norms are whole on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch.nn import functional as F

# The weight that tells a rank which one it is: int32 `[1]`.
RANK = "rank"


class Group(ABC):
    """The ranks that share a model.

    Attributes:
        world: how many.
    """

    world: int = 1

    @abstractmethod
    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, on every rank."""

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' `x` side by side along the last axis, in the order of ranks."""


class Alone(Group):
    """One rank: nothing to do."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


ALONE = Alone()


# Operators of our own, so that torch.export records a collective as one call and needs no process group for it.
@torch.library.custom_op("eagle3_hf::sum_ranks", mutates_args=())
def _sum_ranks(x: torch.Tensor, world: int) -> torch.Tensor:
    made = x.clone()
    torch.distributed.all_reduce(made)
    return made


@_sum_ranks.register_fake
def _(x: torch.Tensor, world: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("eagle3_hf::gather_ranks", mutates_args=())
def _gather_ranks(x: torch.Tensor, world: int) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(world)]
    torch.distributed.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-1)


@_gather_ranks.register_fake
def _(x: torch.Tensor, world: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], world * x.shape[-1])


class DistributedGroup(Group):
    """`torch.distributed`'s default process group, one process a rank."""

    def __init__(self, world: int):
        self.world = world

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return _sum_ranks(x, self.world)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return _gather_ranks(x, self.world)


def embed(ids: torch.Tensor, table: torch.Tensor, rank: torch.Tensor | None, group: Group) -> torch.Tensor:
    """Rows of a table over the vocabulary, which may be split.

    Args:
        ids: int32 `[batch, n]`.
        table: `[vocabulary, width]`, or this rank's rows of it.
        rank: int32 `[1]`; `None` where there is one rank.

    Returns:
        `[batch, n, width]`, whole on every rank.
    """
    if rank is None:
        return F.embedding(ids.long(), table)
    own = ids - rank * table.shape[0]
    mine = (own >= 0) & (own < table.shape[0])
    rows = F.embedding(torch.where(mine, own, torch.zeros_like(own)).long(), table)
    return group.sum(torch.where(mine[..., None], rows, torch.zeros_like(rows)))


def likeliest(logits: torch.Tensor, vocabulary: int, rank: torch.Tensor | None, group: Group) -> torch.Tensor:
    """The token of the highest logit; of equal ones the first, as an argmax over all of them gives it.

    Args:
        logits: `[batch, n, vocabulary]`, or this rank's columns of it; columns past the vocabulary are ignored.
        vocabulary: tokens there are.
        rank: int32 `[1]`; `None` where there is one rank.

    Returns:
        int32 `[batch, n]`.
    """
    if rank is None:
        return logits.argmax(dim=-1).to(torch.int32)
    first = rank * logits.shape[-1]
    tokens = first + torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    real = torch.where(tokens < vocabulary, logits, torch.full_like(logits, torch.finfo(logits.dtype).min))
    best = real.argmax(dim=-1, keepdim=True)
    heights, found = group.gather(real.gather(-1, best)), group.gather(best.to(torch.int32) + first)
    return found.gather(-1, heights.argmax(dim=-1, keepdim=True))[..., 0]
