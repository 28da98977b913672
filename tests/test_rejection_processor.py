"""RejectionLogitsProcessor and the readable reference: both give the target's distribution."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from rejection_tables import chi_squared
from support import make_target, prompts
from transformers import LogitsProcessorList

from eagle3_hf import RejectionLogitsProcessor, speculative_decode
from eagle3_hf.decoding import reference

VOCAB, PROMPT = 5, torch.tensor([[3, 1]])


def distributions(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, generator=generator), torch.randn(VOCAB, generator=generator).softmax(0)


def chance(p: torch.Tensor, q: torch.Tensor | None, candidates: tuple[int, ...], replacement: bool) -> torch.Tensor:
    """Distribution of the token after these candidates are tried in turn, the last step done by the processor."""
    out, alive, given, offered = torch.zeros(VOCAB), 1.0, p.clone(), None if q is None else q.clone()
    for x in candidates:
        ratio = given[x] if offered is None else min(1.0, float(given[x] / offered[x]))
        out[x] += alive * ratio
        alive = alive * (1 - ratio)
        own = torch.nn.functional.one_hot(torch.tensor(x), VOCAB)
        given = given * (1 - own) if offered is None else (given - offered).clamp(min=0)
        given = given / given.sum()
        if offered is not None and not replacement:
            offered = offered * (1 - own) / (1 - offered[x])
    scores = RejectionLogitsProcessor(torch.tensor([candidates]), None if q is None else q[None], replacement)(
        torch.zeros(1, 3, dtype=torch.long), p.log()[None]
    )
    return out + alive * scores[0].exp()


def test_deterministic_candidates_leave_the_target() -> None:
    scores, _ = distributions()
    p = scores.softmax(0)
    for candidates in ((), (2,), (4, 0), (1, 2, 3)):
        torch.testing.assert_close(chance(p, None, candidates, False), p)


@pytest.mark.parametrize("replacement", [False, True])
def test_sampled_candidates_leave_the_target(replacement: bool) -> None:
    # Over all pairs of candidates, each with the chance that the draft draws it.
    scores, q = distributions()
    p, total = scores.softmax(0), torch.zeros(VOCAB)
    for first, second in itertools.product(range(VOCAB), repeat=2):
        if replacement:
            total += q[first] * q[second] * chance(p, q, (first, second), True)
        elif first != second:
            total += q[first] * q[second] / (1 - q[first]) * chance(p, q, (first, second), False)
    torch.testing.assert_close(total, p)
    with mock.patch("eagle3_hf.decoding.rejection_tree.residual", lambda p, q: p):
        wrong = sum(q[x] * chance(p, q, (x,), True) for x in range(VOCAB))
    assert (wrong - p).abs().max() > 0.02


def test_rows_without_a_rejection_and_other_positions_are_left_alone() -> None:
    scores = torch.randn(2, VOCAB)
    ids = torch.zeros(2, 4, dtype=torch.long)
    out = RejectionLogitsProcessor(torch.tensor([[3], [-1]]))(ids, scores)
    assert out[0, 3] == float("-inf")
    torch.testing.assert_close(out[1], scores[1].log_softmax(-1))
    assert RejectionLogitsProcessor(torch.tensor([[3], [1]]), length=5)(ids, scores) is scores
    with pytest.raises(ValueError, match="given for 1 rows, scores have 2"):
        RejectionLogitsProcessor(torch.tensor([[3]]))(ids, scores)
    with pytest.raises(ValueError, match="candidates"):
        RejectionLogitsProcessor(torch.tensor([3]))
    with pytest.raises(ValueError, match="rejected has 1 rows, draft_probs has 2"):
        RejectionLogitsProcessor(torch.tensor([[3]]), torch.ones(2, VOCAB))


def test_inside_generate() -> None:
    # The first token is the residual's, after temperature; the second is the target's own again.
    target = make_target("llama")
    inputs = prompts(1, 4)
    n, temperature = 4000, 0.8
    p = (target(**inputs).logits[0, -1] / temperature).softmax(-1).detach()
    q = (p.log() + torch.randn(16, generator=torch.Generator().manual_seed(1))).softmax(-1)
    processor = RejectionLogitsProcessor(torch.full((n, 1), int(q.argmax())), q.expand(n, -1), length=4)
    torch.manual_seed(0)
    made = target.generate(
        **inputs, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=2, num_return_sequences=n,
        logits_processor=LogitsProcessorList([processor]),
    )  # fmt: skip
    left = (p - q).clamp(min=0)
    counts = torch.bincount(made[:, 4], minlength=16)
    assert counts[left == 0].sum() == 0
    assert chi_squared(counts, left) > 0.01
    assert (made[:, 5] == int(q.argmax())).any() or p[int(q.argmax())] < 0.01


class Table:
    """A model of the last token alone: logits from a random table."""

    def __init__(self, seed: int, near: Table | None = None):
        self.logits = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))
        if near is not None:
            self.logits = near.logits + 0.7 * self.logits
        self.forwards = 0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return self.logits[tokens]


def p_value(temperature: float, draws: int = 3000) -> float:
    target = Table(0)
    draft = Table(1, near=target)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.double)
    for _ in range(draws):
        out = speculative_decode(target, draft, PROMPT, 2, temperature, max_new_tokens=2, generator=generator)
        counts[out[0, 2], out[0, 3]] += 1
    probs = (target.logits / temperature).softmax(-1).double()
    return chi_squared(counts, probs[1][:, None] * probs)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_reference_distribution(temperature: float) -> None:
    assert p_value(temperature) > 0.01


def test_a_wrong_residual_shows_in_the_reference() -> None:
    with mock.patch.object(torch.Tensor, "clamp", lambda self, **_: torch.zeros_like(self)):  # p in place of (p - q)+
        assert p_value(1.0) < 1e-4


def test_reference_greedy_is_the_targets_text() -> None:
    target = make_target("llama")
    prompt = prompts(1, 5)["input_ids"]
    plain = target.generate(input_ids=prompt, do_sample=False, max_new_tokens=15)
    other = make_target("llama", seed=4)
    for draft, tokens in ((target, 4), (other, 3), (other, 20)):
        assert speculative_decode(target, draft, prompt, tokens, 0.0, max_new_tokens=15).equal(plain)
    eos = int(plain[0, 9])
    first = plain[0, 5:].tolist().index(eos)
    assert speculative_decode(target, target, prompt, 4, 0.0, 15, eos).tolist() == plain[:, : 6 + first].tolist()


def test_reference_uses_few_target_forwards() -> None:
    target = Table(0)
    out = speculative_decode(target, Table(0), PROMPT, 4, 1.0, max_new_tokens=20)
    assert out.shape == (1, 22)
    assert target.forwards == 4  # the same model as draft: five tokens a forward


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.long), 2, r"got \[2, 3\]"),
        (torch.zeros(1, 0, dtype=torch.long), 2, r"got \[1, 0\]"),
        (PROMPT, 0, "at least 1"),
    ],
)
def test_reference_refuses(prompt: torch.Tensor, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference.speculative_decode(Table(0), Table(0), prompt, tokens)


def test_the_example_runs(capsys: Any) -> None:
    import runpy
    from pathlib import Path

    path = Path(__file__).parents[1] / "examples" / "speculative_decoding_from_scratch.py"
    runpy.run_path(str(path), run_name="__main__")
    assert "identical: True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"max_new_tokens": -1}, "max_new_tokens -1"),
        ({"eos_token_id": [1, 2]}, "one eos_token_id"),
    ],
)
def test_reference_options_that_would_be_taken_wrongly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speculative_decode(Table(0), Table(0), PROMPT, 2, **options)


def test_vocabularies_that_differ_are_named() -> None:
    with pytest.raises(ValueError, match="the draft 3"):
        speculative_decode(Table(0), lambda tokens: torch.zeros(1, tokens.shape[1], 3), PROMPT, 2)
    processor = RejectionLogitsProcessor(torch.tensor([[1]]), torch.ones(1, 3) / 3)
    with pytest.raises(ValueError, match=r"draft_probs must be \[1, 5\], got \[1, 3\]"):
        processor(torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 5))
