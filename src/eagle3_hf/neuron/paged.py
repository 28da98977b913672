"""Arithmetic for servers that keep keys and values in blocks: block tables, slot mappings, writing and reading.

The graphs of this package use one contiguous stretch a row, where a token's slot is its position. A paged server gives
each row a table of blocks anywhere in one memory. These functions say where each token goes, and turn one layout into
the other. All are static: no shape depends on a value, and every operation has an XLA lowering.
"""

from __future__ import annotations

import torch


def paged_slots(positions: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Where positions lie in a paged memory: `block_table[pos // block_size] * block_size + pos % block_size`.

    Args:
        positions: int32 `[batch, n]`, each below `block_table.shape[1] * block_size`.
        block_table: int32 `[batch, blocks]`, the physical number of each block of a row.
        block_size: slots in a block.

    Returns:
        int32 `[batch, n]` physical slots.
    """
    block = torch.div(positions, block_size, rounding_mode="floor")
    physical = block_table.gather(1, block.long())
    return physical * block_size + positions % block_size


def slot_mapping(
    positions: torch.Tensor, real: torch.Tensor, block_table: torch.Tensor, block_size: int, scratch: int
) -> torch.Tensor:
    """Where each token of a step is written: its slot, or the scratch slot.

    Args:
        positions: int32 `[batch, n]`. Those past the table go to scratch: drafts may reach over a row's end.
        real: bool `[batch, n]`, false for padding.
        block_table: int32 `[batch, blocks]`.
        block_size: slots in a block.
        scratch: a slot in a block that no table names.

    Returns:
        int32 `[batch, n]`.
    """
    end = block_table.shape[1] * block_size
    slots = paged_slots(positions.clamp(min=0, max=end - 1), block_table, block_size)
    return torch.where(real & (positions >= 0) & (positions < end), slots, torch.full_like(slots, scratch))


def write_paged(memory: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of a paged memory with new rows in it.

    Args:
        memory: `[kv_heads, slots, head_dim]`, `slots` being blocks times block size.
        rows: `[batch, kv_heads, n, head_dim]`.
        slots: int32 `[batch, n]`, of `slot_mapping`. Which of several rows stays in the scratch slot is open.
    """
    heads, dim = memory.shape[0], memory.shape[2]
    new = rows.transpose(0, 1).reshape(heads, -1, dim)
    return memory.scatter(1, slots.long().reshape(1, -1, 1).expand(heads, -1, dim), new)


def read_paged(memory: torch.Tensor, block_table: torch.Tensor, block_size: int) -> torch.Tensor:
    """Every row's keys or values in the order of positions, as the graphs' attention reads them.

    Args:
        memory: `[kv_heads, slots, head_dim]`.
        block_table: int32 `[batch, blocks]`.
        block_size: slots in a block.

    Returns:
        `[batch, kv_heads, blocks * block_size, head_dim]`.
    """
    batch, blocks = block_table.shape
    heads, _, dim = memory.shape
    gathered = memory.view(heads, -1, block_size * dim).index_select(1, block_table.flatten())
    return gathered.view(heads, batch, blocks * block_size, dim).transpose(0, 1)
