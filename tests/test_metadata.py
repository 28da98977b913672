"""Indices of flat interleaved batches: the worked case, and random batches against a loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_hf import SpeculationMetadata


def test_worked_case() -> None:
    ids = torch.arange(1000, 1209)
    made = SpeculationMetadata.build([4, 104, 107, 207, 209], [3, 0, 2, 0, 1], ids)
    assert made.num_draft_tokens.tolist() == [3, 0, 2, 0, 1]
    assert made.cu_num_draft_tokens.tolist() == [3, 3, 5, 5, 6]
    assert made.logits_indices.tolist() == [0, 1, 2, 3, 103, 104, 105, 106, 206, 207, 208]
    assert made.target_logits_indices.tolist() == [0, 1, 2, 5, 6, 9]
    assert made.bonus_logits_indices.tolist() == [3, 4, 7, 8, 10]
    assert made.max_spec_len == 3
    assert made.draft_token_ids is not None
    assert made.draft_token_ids.tolist() == [1001, 1002, 1003, 1105, 1106, 1208]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), min_size=0, max_size=8))
def test_against_a_loop(rows: list[tuple[int, int]]) -> None:
    flat, needed, targets, bonus, drafts, ends = [], [], [], [], [], []
    for count, extra in rows:
        tokens = [100 * len(ends) + i for i in range(count + extra)]
        for i in range(count + 1):
            (targets if i < count else bonus).append(len(needed))
            needed.append(len(flat) + extra - 1 + i)
        flat += tokens
        drafts += tokens[extra:]
        ends.append(len(flat))
    made = SpeculationMetadata.build(ends, [count for count, _ in rows], torch.tensor(flat, dtype=torch.long))
    assert made.logits_indices.tolist() == needed
    assert made.target_logits_indices.tolist() == targets
    assert made.bonus_logits_indices.tolist() == bonus
    assert made.draft_token_ids is not None
    assert made.draft_token_ids.tolist() == drafts
    assert made.max_spec_len == max((count for count, _ in rows), default=0)


@pytest.mark.parametrize(
    ("ends", "counts", "options", "message"),
    [
        ([4], [3, 0], {}, "1 rows are scheduled, num_draft_tokens has 2"),
        ([4, 5], [3, 1], {}, "row 1 schedules 1 tokens"),
        ([4], [-1], {}, "row 0 schedules"),
        ([4], [3], {"max_spec_len": 2}, "max_spec_len is 2"),
        ([4], [3], {"input_ids": torch.zeros(1, 4, dtype=torch.long)}, r"got \[1, 4\]"),
        ([], [], {"input_ids": torch.zeros(2, dtype=torch.long)}, "0 tokens are scheduled"),
        (
            [4],
            [3],
            {"input_ids": torch.zeros(5, dtype=torch.long)},
            r"4 tokens are scheduled, input_ids must .* got \[5\]",
        ),
    ],
)
def test_wrong_counts_are_named(ends: list[int], counts: list[int], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationMetadata.build(ends, counts, **options)


def test_fractions_are_not_cut_off() -> None:
    with pytest.raises(TypeError):
        SpeculationMetadata.build([5.5, 7.0], [2, 0])  # type: ignore[list-item]
