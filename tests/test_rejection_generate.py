"""`draft_sampling`: chains whose tokens are drawn from the draft, through `generate()`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from rejection_tables import chi_squared
from support import CHAIN, DYNAMIC, STATIC, make_draft, make_target, prompts
from transformers import LogitsProcessorList

from eagle3_hf import DrafterInvariantSampling, Eagle3DraftModel
from eagle3_hf.decoding import rejection_tree
from eagle3_hf.decoding.loop import _Session

SAMPLE = {"num_assistant_tokens": 2, "draft_sampling": "sample"}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.7},
    "hot": {"temperature": 1.5},
    "top_k": {"temperature": 1.0, "top_k": 4},
    "top_p": {"temperature": 1.3, "top_p": 0.7},
    "min_p": {"temperature": 1.5, "min_p": 0.15},
    "penalty": {"temperature": 0.8, "repetition_penalty": 1.8},
}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Eagle3DraftModel]:
    target = make_target("llama")
    # A sharp draft: q far from p, so that mistakes in the residual show.
    draft = make_draft(target, draft_vocab_size=16)
    with torch.no_grad():
        draft.lm_head.weight *= 2
    return target, draft


def exact(target: Any, prompt: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Probabilities of the next two tokens, `[vocab * vocab]`: the processors that `generate()` makes, by hand."""
    captured: dict[str, Any] = {}

    def keep(self: Any, *args: Any, **kwargs: Any) -> Any:
        captured["steps"] = type(target).__mro__[2]._get_logits_processor(self, *args, **kwargs)
        return captured["steps"]

    with mock.patch.object(type(target), "_get_logits_processor", keep):
        target.generate(input_ids=prompt, do_sample=True, max_new_tokens=1, **({"top_k": 0} | settings))
    steps = LogitsProcessorList(captured["steps"])
    for step in steps:  # made for one row, used for many
        if isinstance(getattr(step, "prompt_ignore_length", None), torch.Tensor):
            step.prompt_ignore_length = None

    def probs(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return steps(ids, target(ids).logits[:, -1].float()).softmax(-1).double()

    following = torch.cat((prompt.expand(16, -1), torch.arange(16)[:, None]), 1)
    return (probs(prompt)[0][:, None] * probs(following)).flatten()


def two_tokens(models: Any, settings: dict[str, Any], n: int, batch: int = 1000, drafting: Any = SAMPLE) -> Any:
    """Counts of the first two of three new tokens over `n` texts."""
    target, draft = models
    prompt = torch.tensor([[5, 9, 4]])
    counts = torch.zeros(256, dtype=torch.long)
    for _ in range(n // batch):
        made = target.generate(
            input_ids=prompt, do_sample=True, max_new_tokens=3, num_return_sequences=batch, assistant_model=draft,
            **({"top_k": 0} | settings), **drafting,
        )  # fmt: skip
        counts += torch.bincount(made[:, 3] * 16 + made[:, 4], minlength=256)
    return counts


def fits(models: Any, settings: dict[str, Any], **options: Any) -> tuple[float, float]:
    """p-value against the exact distribution; two draws, as in the battery, unless the first is good."""
    truth = exact(models[0], torch.tensor([[5, 9, 4]]), settings)
    p_value, impossible = 0.0, 0.0
    for n in (3000, 6000):
        counts = two_tokens(models, settings, n, **options)
        impossible = float(counts[truth == 0].sum())
        p_value = chi_squared(counts, truth)
        if p_value > 0.01:
            break
    return p_value, impossible


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution(models: Any, name: str) -> None:
    torch.manual_seed(0)
    p_value, impossible = fits(models, SETTINGS[name])
    assert p_value > 0.01
    assert impossible == 0
    assert models[0].speculation_stats.accepted > 0


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.slow
def test_distribution_by_batch(models: Any, batch: int) -> None:
    torch.manual_seed(0)
    assert fits(models, SETTINGS["penalty"], batch=batch)[0] > 0.01


def test_the_draft_is_told_apart_by_a_wrong_residual(models: Any) -> None:
    torch.manual_seed(0)
    with mock.patch.object(rejection_tree, "residual", lambda p, q: p):
        assert fits(models, SETTINGS["plain"])[0] < 1e-6


def test_a_q_that_the_tokens_were_not_drawn_from_shows(models: Any) -> None:
    original = _Session._draw

    def unprocessed(self: Any, logits: torch.Tensor, drafted: torch.Tensor) -> Any:
        return original(self, logits, drafted)[0], logits.softmax(-1)

    torch.manual_seed(0)
    with mock.patch.object(_Session, "_draw", unprocessed):
        assert fits(models, {"temperature": 2.0})[0] < 1e-6


def test_a_dropped_processor_shows(models: Any) -> None:
    truth = exact(models[0], torch.tensor([[5, 9, 4]]), SETTINGS["penalty"])
    torch.manual_seed(0)
    assert chi_squared(two_tokens(models, {"temperature": 0.8}, 3000), truth) < 1e-6


def test_ragged_rows_and_processors_that_read_the_text(models: Any) -> None:
    # Each row may only count upwards from its last token: a draft whose q is made with another row's text, or with
    # the wrong number of drafted tokens, would be refused everywhere or let something else through.
    target, draft = models
    inputs = prompts(6, 8)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [(int(ids[-1]) + 1 + row) % 16]

    made = target.generate(
        **inputs, do_sample=True, max_new_tokens=12, prefix_allowed_tokens_fn=allowed, assistant_model=draft, **SAMPLE
    )
    steps = (made[:, 8:] - made[:, 7:-1]) % 16
    assert steps.equal(torch.arange(1, 7)[:, None].expand(-1, 12))
    assert target.speculation_stats.acceptance_rate == 1.0


def test_a_draft_vocabulary_without_any_allowed_token(models: Any) -> None:
    target, _ = models
    draft = make_draft(target, draft_vocab_size=8)
    missing = [token for token in range(16) if not draft.t2d[token]]
    made = target.generate(
        **prompts(3, 6), do_sample=True, max_new_tokens=8, assistant_model=draft, top_p=0.9,
        prefix_allowed_tokens_fn=lambda row, ids: missing, **SAMPLE,
    )  # fmt: skip
    assert torch.isin(made[:, 6:], torch.tensor(missing)).all()


def test_confidence_stops_behind_a_token(models: Any) -> None:
    target, draft = models
    torch.manual_seed(0)
    # Every token is below this threshold: one is drafted all the same, and the texts stay right.
    drafting = {"num_assistant_tokens": 4, "draft_sampling": "sample", "assistant_confidence_threshold": 0.999}
    assert fits(models, {"temperature": 1.5}, drafting=drafting)[0] > 0.01
    target.generate(
        **prompts(1, 5), do_sample=True, temperature=2.0, max_new_tokens=10, assistant_model=draft, **drafting
    )
    stats = target.speculation_stats
    assert stats.drafted < 2 * stats.rounds


def test_greedy_text_is_the_same(models: Any) -> None:
    target, draft = models
    inputs = prompts(4, 7)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=15)
    made = target.generate(**inputs, do_sample=False, max_new_tokens=15, assistant_model=draft, **SAMPLE)
    assert made.equal(plain)


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_draft_shares_invariant_noise(do_sample: bool) -> None:
    # Drawn drafts go through the same processors, the noise among them, so a draft near the target draws what the
    # target draws, where its likeliest token often isn't that.
    target = make_target("llama")
    draft = make_draft(target)
    inputs = prompts(4, 7)
    options: dict[str, Any] = {
        "logits_processor": LogitsProcessorList([DrafterInvariantSampling(range(4))]),
        "do_sample": do_sample, "max_new_tokens": 40,
    }  # fmt: skip
    plain = target.generate(**inputs, **options)
    accepted = []
    for drafting in (CHAIN, CHAIN | {"draft_sampling": "sample"}):
        with mock.patch.object(draft.lm_head, "forward", lambda x: 0.0 * x[..., :1].expand(*x.shape[:-1], 12)):
            made = target.generate(**inputs, assistant_model=draft, **drafting, **options)
        assert made.equal(plain)
        accepted.append(target.speculation_stats.acceptance_rate)
    # Even a draft that knows nothing (all logits equal) guesses better with the noise than without.
    assert accepted[1] > 2 * accepted[0]


@pytest.mark.parametrize("drafting", [DYNAMIC, STATIC])
def test_trees_are_refused(models: Any, drafting: dict[str, Any]) -> None:
    target, draft = models
    with pytest.raises(ValueError, match="draft_sampling='sample' drafts chains"):
        target.generate(**prompts(1, 4), max_new_tokens=2, assistant_model=draft, draft_sampling="sample", **drafting)


def test_unknown_values_are_refused(models: Any) -> None:
    target, draft = models
    with pytest.raises(ValueError, match="'greedy' or 'sample', got 'random'"):
        target.generate(**prompts(1, 4), max_new_tokens=2, assistant_model=draft, draft_sampling="random")
