"""Tensor-parallel shards of a draft's weights, as pure functions of its state dict; joining them is exact.

Column shards (q, k, v, gate, up) split what a matrix writes, row shards (o, down) what it reads: their outputs are
summed over the ranks, so a bias lives on rank 0 alone. Tables over a vocabulary are split by tokens, the last rank's
part padded with zero rows to the size of the others. `fc`, norms and the vocabulary map are on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..configuration_eagle3 import Eagle3Config

_COLUMNS = {"q_proj", "gate_proj", "up_proj"}
_KEY_VALUE = {"k_proj", "v_proj"}
_ROWS = {"o_proj", "down_proj"}
_TABLES = {"lm_head", "embed_tokens"}


def _kind(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def vocabulary_range(size: int, rank: int, world: int) -> tuple[int, int]:
    """First token and one past the last that `rank` of `world` holds; the last ranks may hold fewer, or none."""
    rows = -(-size // world)
    return min(rank * rows, size), min((rank + 1) * rows, size)


def shard_table(table: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Rows of a `[vocabulary, width]` table for one rank: `[ceil(vocabulary / world), width]`, zero rows at the end."""
    first, last = vocabulary_range(table.shape[0], rank, world)
    rows = -(-table.shape[0] // world)
    part = table[first:last]
    return torch.cat((part, part.new_zeros(rows - len(part), *part.shape[1:])))


def join_table(shards: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """Undo [`shard_table`]: `size` is the real number of rows."""
    return torch.cat(tuple(shards))[:size]


def check_world(config: Eagle3Config, world: int) -> None:
    """Raise ValueError unless heads and MLP can be split over `world` ranks."""
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if world < 1 or heads % world:
        raise ValueError(f"num_attention_heads {heads} can't be split over {world} ranks")
    if kv % world and world % kv:
        raise ValueError(f"num_key_value_heads {kv} can be neither split over {world} ranks nor repeated on them")
    if config.intermediate_size % world:
        raise ValueError(f"intermediate_size {config.intermediate_size} can't be split over {world} ranks")


def _key_value(tensor: torch.Tensor, config: Eagle3Config, rank: int, world: int) -> torch.Tensor:
    kv, dim = config.num_key_value_heads, config.head_dim
    if kv % world == 0:
        return tensor.chunk(world)[rank].clone()
    head = rank * kv // world  # more ranks than heads: neighbours hold the same one
    return tensor[head * dim : (head + 1) * dim].clone()


def shard_state_dict(
    state: dict[str, torch.Tensor], config: Eagle3Config, rank: int, world: int
) -> dict[str, torch.Tensor]:
    """The part of a draft's tensors that one rank holds.

    Args:
        state: tensors by this package's names.
        config: the whole draft's configuration.
        rank: which part, `0..world-1`.
        world: how many.

    Raises:
        ValueError: sizes that can't be split, or a rank outside the world.
    """
    check_world(config, world)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} isn't in 0..{world - 1}")
    made = {}
    for name, tensor in state.items():
        kind = _kind(name)
        if kind in _COLUMNS:
            made[name] = tensor.chunk(world)[rank].clone()
        elif kind in _KEY_VALUE:
            made[name] = _key_value(tensor, config, rank, world)
        elif kind in _ROWS:
            if name.endswith(".bias"):
                made[name] = tensor.clone() if rank == 0 else torch.zeros_like(tensor)
            else:
                made[name] = tensor.chunk(world, dim=1)[rank].clone()
        elif kind in _TABLES:
            made[name] = shard_table(tensor, rank, world)
        else:
            made[name] = tensor.clone()
    return made


def join_state_dicts(shards: Sequence[dict[str, torch.Tensor]], config: Eagle3Config) -> dict[str, torch.Tensor]:
    """Undo [`shard_state_dict`]: `shards` are those of all ranks, in order."""
    world = len(shards)
    check_world(config, world)
    made = {}
    for name in shards[0]:
        parts, kind = [shard[name] for shard in shards], _kind(name)
        if kind in _COLUMNS:
            made[name] = torch.cat(parts)
        elif kind in _KEY_VALUE:
            made[name] = torch.cat(parts[:: max(1, world // config.num_key_value_heads)])
        elif kind in _ROWS and not name.endswith(".bias"):
            made[name] = torch.cat(parts, dim=1)
        elif kind in _TABLES:
            made[name] = join_table(parts, config.draft_vocab_size if kind == "lm_head" else config.vocab_size)
        else:
            made[name] = parts[0].clone()
    return made
