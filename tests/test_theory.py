"""Acceptance theory against simulation and against the samplers."""

from __future__ import annotations

import pytest
import torch

from eagle3_hf.decoding.rejection import Draws, rejection_sample
from eagle3_hf.decoding.theory import (
    acceptance_probability,
    best_drafted,
    expected_tokens,
    expected_tokens_at,
    expected_tokens_tree,
    speedup,
)


def test_expected_tokens_is_the_sum_of_powers() -> None:
    for acceptance in (0.0, 0.3, 0.8, 1.0):
        for drafted in (0, 1, 5):
            powers = sum(acceptance**i for i in range(drafted + 1))
            assert expected_tokens(acceptance, drafted) == pytest.approx(powers)
            assert expected_tokens_at([acceptance] * drafted) == pytest.approx(powers)


def test_expected_tokens_at_matches_counts() -> None:
    # 10 rounds of 3 drafts: 4 keep all, 3 keep two, 2 keep one, 1 keeps none.
    assert expected_tokens_at([9 / 10, 7 / 9, 4 / 7]) == pytest.approx((4 * 4 + 3 * 3 + 2 * 2 + 1) / 10)
    assert expected_tokens_tree([9 / 10, 7 / 10, 4 / 10]) == pytest.approx(3.0)


@pytest.mark.parametrize("onehot", [False, True])
def test_acceptance_probability_is_what_the_sampler_does(onehot: bool) -> None:
    torch.manual_seed(0)
    n, vocab = 200_000, 6
    scores, q = torch.randn(vocab), torch.randn(vocab).softmax(0)
    if onehot:
        q = torch.nn.functional.one_hot(torch.tensor(2), vocab).float()
    drafts = torch.multinomial(q.expand(n, -1), 1)
    out = rejection_sample(
        drafts, scores.expand(n, 2, -1), None if onehot else q.expand(n, 1, -1), draws=Draws.make(n, 1, vocab)
    )
    kept = (out[:, 1] >= 0).float().mean().item()
    expected = acceptance_probability(scores.softmax(0), q).item()
    assert abs(kept - expected) < 4 * (expected * (1 - expected) / n) ** 0.5


def test_speedup() -> None:
    assert speedup(0.8, 4, 0.0) == pytest.approx(expected_tokens(0.8, 4))
    assert speedup(0.8, 4, 0.1, verify_cost=2.0) == pytest.approx(expected_tokens(0.8, 4) / 2.4)
    assert speedup(0.0, 4, 0.1) < 1
    assert best_drafted(0.0, 0.05) == 0
    assert best_drafted(0.95, 0.01) > best_drafted(0.5, 0.01) > 0
    # Verification that gets dear with width makes long drafts pay less.
    assert best_drafted(0.9, 0.05, [1, 1.5, 2.5, 4, 6]) < best_drafted(0.9, 0.05)


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"got 1\.2"):
        expected_tokens(1.2, 3)
    with pytest.raises(ValueError, match="got -1"):
        expected_tokens(0.5, -1)
    with pytest.raises(ValueError, match="verification 0"):
        speedup(0.5, 3, 0.1, 0)
    with pytest.raises(ValueError, match=r"whole, got 2\.5"):
        expected_tokens(0.5, 2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got 1\.5"):
        expected_tokens_tree([0.5, 1.5])
    with pytest.raises(ValueError, match="draft nan"):
        speedup(0.5, 3, float("nan"))
    with pytest.raises(ValueError, match="most is -1"):
        best_drafted(0.5, 0.1, most=-1)
    with pytest.raises(ValueError, match="no number to choose"):
        best_drafted(0.5, 0.1, [])
