"""The arithmetic of paged memory: against a loop, and attention over blocks against attention over one stretch."""

import torch
from neuron_support import ALLOWED, short_names
from torch import nn

from eagle3_hf.neuron.layers import attend, write_slots
from eagle3_hf.neuron.paged import paged_slots, read_paged, slot_mapping, write_paged

BLOCK, BLOCKS, HEADS, DIM = 4, 3, 2, 8
# Blocks of a memory of 8; block 7 is nobody's, and its last slot is scratch.
TABLE = torch.tensor([[5, 2, 6], [0, 4, 1]], dtype=torch.int32)
SCRATCH = 8 * BLOCK - 1


def test_slots_against_a_loop():
    positions = torch.tensor([[0, 3, 4, 11], [1, 7, 8, 5]], dtype=torch.int32)
    wanted = [[int(TABLE[r, p // BLOCK]) * BLOCK + p % BLOCK for p in row] for r, row in enumerate(positions.tolist())]
    made = paged_slots(positions, TABLE, BLOCK)
    assert made.tolist() == wanted and made.dtype == torch.int32


def test_padding_and_what_is_past_the_end_go_to_scratch():
    positions = torch.tensor([[10, 11, 12, 13], [-1, 0, 1, 2]], dtype=torch.int32)
    real = torch.tensor([[True] * 4, [True, True, False, True]])
    made = slot_mapping(positions, real, TABLE, BLOCK, SCRATCH)
    assert made.tolist() == [[26, 27, SCRATCH, SCRATCH], [SCRATCH, 0, SCRATCH, 2]]
    assert made.dtype == torch.int32


def step(query, rows, positions, real, table, memory):
    """One step of attention over a paged memory."""
    slots = slot_mapping(positions, real, table, BLOCK, SCRATCH)
    keys, values = (write_paged(part, new, slots) for part, new in zip(memory, rows))
    visible = torch.arange(BLOCK * BLOCKS, dtype=torch.int32) <= positions[..., None]
    read = (read_paged(part, table, BLOCK) for part in (keys, values))
    return attend(query, *read, visible), keys, values


def test_attention_is_that_over_one_stretch():
    torch.manual_seed(0)
    length = BLOCK * BLOCKS
    paged = [torch.randn(HEADS, 8 * BLOCK, DIM) for _ in range(2)]
    plain = [torch.zeros(2, HEADS, length, DIM) for _ in range(2)]
    # A prompt each, of 5 and of 3 tokens, then two rounds of three tokens at each row's own place.
    starts, widths = [[0, 0], [5, 3], [8, 6]], [[5, 3], [3, 3], [3, 3]]
    for start, width in zip(starts, widths):
        n = max(width)
        positions = torch.tensor(start, dtype=torch.int32)[:, None] + torch.arange(n, dtype=torch.int32)
        real = torch.arange(n) < torch.tensor(width)[:, None]
        query, rows = torch.randn(2, 4, n, DIM), [torch.randn(2, HEADS, n, DIM) for _ in range(2)]
        out, *paged = step(query, rows, positions, real, TABLE, paged)
        for row, count in enumerate(width):  # row by row: the contiguous layout has its scratch slot inside
            for part, new in zip(plain, rows):
                part[row : row + 1] = write_slots(
                    part[row : row + 1], new[row : row + 1, :, :count], positions[row : row + 1, :count].long()
                )
        visible = torch.arange(length) <= positions[..., None]
        wanted = attend(query, *plain, visible)
        for row, count in enumerate(width):
            torch.testing.assert_close(out[row, :count], wanted[row, :count])
    untouched = [slot for slot in range(8 * BLOCK) if slot // BLOCK in (3, 7) and slot != SCRATCH]
    torch.manual_seed(0)
    for part in paged:
        assert torch.equal(part[:, untouched], torch.randn(HEADS, 8 * BLOCK, DIM)[:, untouched])


def test_rows_that_share_a_block_read_the_same():
    memory = torch.randn(HEADS, 8 * BLOCK, DIM)
    shared = torch.tensor([[3, 1, 2], [3, 5, 6]], dtype=torch.int32)
    read = read_paged(memory, shared, BLOCK)
    assert torch.equal(read[0, :, :BLOCK], read[1, :, :BLOCK])
    assert torch.equal(read[1, :, BLOCK : 2 * BLOCK], memory[:, 5 * BLOCK : 6 * BLOCK])


def test_only_operators_that_lower():
    class Step(nn.Module):
        def forward(self, query, rows, positions, real, table, memory):
            return step(query, rows, positions, real, table, memory)

    rows, memory = ([torch.randn(2, HEADS, 3, DIM)] * 2, [torch.randn(HEADS, 8 * BLOCK, DIM)] * 2)
    positions, real = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, 3, dtype=torch.bool)
    program = torch.export.export(Step(), (torch.randn(2, 4, 3, DIM), rows, positions, real, TABLE, memory))
    assert not program.range_constraints and not program.graph_signature.user_inputs_to_mutate
    short = short_names(str(node.target) for node in program.graph.nodes if node.op == "call_function")
    # All of these have a lowering too; the graphs just don't need them.
    assert short <= ALLOWED | {"div", "remainder", "__and__", "bitwise_and", "ge"}
