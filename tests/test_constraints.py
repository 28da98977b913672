"""Constraints that only know texts which can come about: drafted ones may not, and that is no fault of the call."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from scipy import stats
from support import EOS, PAD, SHAPES, make_draft, make_target, oracle
from transformers import LogitsProcessor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROMPT = [[3, 4, 5]]
# Texts of different lengths that share beginnings; after them, nothing is known.
TEXTS = [(6, 7, 8, EOS), (6, 8, 8, 9, 10, EOS), (6, 7, 9, 11, 5, 5, EOS), (9, 7, EOS), (9, 9, 9, 9, 9, EOS)]


def following(text: tuple[int, ...]) -> list[int]:
    return sorted({t[len(text)] for t in TEXTS if len(t) > len(text) and t[: len(text)] == text})


def trie(row: int, ids: torch.Tensor) -> list[int]:
    return following(tuple(ids[len(PROMPT[0]) :].tolist()))


class Grammar(LogitsProcessor):
    """Drops every token that doesn't go on to one of the texts; where there is none, that is all of them."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(scores, float("-inf"))
        for row, ids in enumerate(input_ids):
            allowed = trie(row, ids)
            out[row, allowed] = scores[row, allowed]
        return out


class Patient(Grammar):
    """What plain generation of several rows needs: it asks about those that have ended too."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out = super().__call__(input_ids, scores)
        out[out.isneginf().all(dim=1), PAD] = 0
        return out


class Table(Grammar):
    """Has no entry for other texts."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not all(trie(row, ids) for row, ids in enumerate(input_ids)):
            raise KeyError("no such text")
        return super().__call__(input_ids, scores)


def constraint(kind: str) -> dict[str, Any]:
    if kind == "trie":
        return {"prefix_allowed_tokens_fn": trie}
    return {"logits_processor": [Grammar() if kind == "grammar" else Table()]}


KINDS = ("trie", "grammar", "table")


@pytest.fixture(scope="module")
def models():
    target = make_target("llama", seed=1)
    return target, make_draft(target, seed=2, draft_vocab_size=target.config.vocab_size)


def run(models: Any, shape: dict[str, Any] | None, rows: int = 1, **options: Any) -> list[tuple[int, ...]]:
    target, draft = models
    ids = torch.tensor(PROMPT)
    speculating = {} if shape is None else {"assistant_model": draft, **shape}
    out = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=12,
        eos_token_id=EOS,
        pad_token_id=PAD,
        **({"num_return_sequences": rows} if rows > 1 else {}),
        **options,
        **speculating,
    )
    return [tuple(t for t in row if t != PAD) for row in out[:, ids.shape[1] :].tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_is_plain_and_accepts(models, shape, kind):
    plain = run(models, None, do_sample=False, **constraint(kind))
    assert plain[0] in TEXTS
    with oracle([PROMPT[0] + list(plain[0])], rate=1.0):
        assert run(models, SHAPES[shape], do_sample=False, **constraint(kind)) == plain
    assert models[0].speculation_stats.accepted > 0
    assert run(models, SHAPES[shape], do_sample=False, **constraint(kind)) == plain


# The eta warper refuses rows in which nothing is left.
@pytest.mark.parametrize(
    ("kind", "warper"), [("trie", {}), ("table", {}), ("grammar", {}), ("grammar", {"eta_cutoff": 1e-3})]
)
@pytest.mark.parametrize("shape", [*SHAPES, "drawn"])
def test_sampling_has_plain_distribution(models, shape, kind, warper):
    drafting = {"num_assistant_tokens": 3, "draft_sampling": "sample"} if shape == "drawn" else SHAPES[shape]
    options = {"do_sample": True, "top_k": 0, "temperature": 2.0, **warper}
    rows = 24
    torch.manual_seed(0)
    plain = Counter(run(models, None, 600, logits_processor=[Patient()], **options))
    drawn = Counter(text for _ in range(3) for text in run(models, drafting, rows, **constraint(kind), **options))
    assert set(drawn) <= set(TEXTS)
    table = [[plain[text] + 1, drawn[text] + 1] for text in TEXTS]
    assert stats.chi2_contingency(table).pvalue > 1e-4


@pytest.mark.parametrize("shape", [*SHAPES, "drawn"])
@pytest.mark.parametrize(("kind", "error"), [("trie", ValueError), ("grammar", RuntimeError), ("table", KeyError)])
def test_a_constraint_without_a_way_out_is_an_error_as_in_plain(models, shape, kind, error):
    drafting = {"num_assistant_tokens": 3, "draft_sampling": "sample"} if shape == "drawn" else SHAPES[shape]
    options = {"do_sample": True, **constraint(kind)}
    target, draft = models
    ids = torch.tensor(PROMPT)
    for speculating in ({}, {"assistant_model": draft, **drafting}):
        # Without an EOS the texts come to where nothing may follow.
        with pytest.raises(error):
            target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, **options, **speculating)
