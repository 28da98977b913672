"""Sampled output has plain generation's distribution, and the test that says so notices when it hasn't."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from scipy import stats
from support import make_draft, make_target

from eagle3_hf.decoding import processing, verifier
from eagle3_hf.decoding.verification import Acceptance, accept, select_tokens

VOCAB = 6
PROMPT = [3, 3, 5, 3]
# The first token is the prefill's, the next two are speculated, and the fourth lets both be drafted.
HORIZON, NEW_TOKENS = 3, 4
ROWS, DRAWS = 2000, 20_000

CHAIN = {"num_assistant_tokens": 3}
DYNAMIC = {"num_assistant_tokens": 3, "tree_top_k": 2, "tree_total_tokens": 6}
STATIC = {"tree_paths": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (2, 1), (0, 0, 0)]}
SHAPES = {"chain": CHAIN, "dynamic": DYNAMIC, "static": STATIC}
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1.0": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.08},
    "repetition": {"repetition_penalty": 3.0},
    "all": {"temperature": 1.3, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.4},
}


CASES = [*itertools.product([name for name in SETTINGS if name != "all"], ["chain", "dynamic"])]
CASES += [("all", "chain"), ("all", "static")]


@pytest.fixture(scope="module")
def models():
    target = make_target("llama", seed=4, vocab_size=VOCAB, num_hidden_layers=3, initializer_range=0.25)
    return target, make_draft(target, seed=2)


def sampling(**options: Any) -> dict[str, Any]:
    return {"do_sample": True, "top_k": 0, **options}


def exact_distribution(target: Any, **options: Any) -> torch.Tensor:
    """Probabilities `[VOCAB] * HORIZON` of all continuations, by enumeration with plain generate's own scores."""
    joint, texts = torch.ones(1, dtype=torch.float64), torch.tensor([PROMPT])
    for _ in range(HORIZON):
        out = target.generate(
            texts,
            attention_mask=torch.ones_like(texts),
            max_new_tokens=1,
            return_dict_in_generate=True,
            output_scores=True,
            **sampling(**options),
        )
        joint = (joint[:, None] * out.scores[0].double().softmax(dim=-1)).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat((texts.repeat_interleave(VOCAB, dim=0), following), dim=1)
    return joint.reshape([VOCAB] * HORIZON)


def draw(
    target: Any, draft: Any, shape: dict[str, Any], seed: int, draws: int = DRAWS, **options: Any
) -> tuple[torch.Tensor, float]:
    """Counts `[VOCAB] * HORIZON` of `draws` speculative continuations, and accepted draft tokens a round."""
    torch.manual_seed(seed)
    ids = torch.tensor([PROMPT]).repeat(ROWS, 1)
    counts = torch.zeros(VOCAB**HORIZON, dtype=torch.long)
    weights = torch.tensor([VOCAB**place for place in reversed(range(HORIZON))])
    accepted = rounds = 0
    for _ in range(draws // ROWS):
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            assistant_model=draft,
            **shape,
            **sampling(**options),
        )
        new = out[:, len(PROMPT) : len(PROMPT) + HORIZON]
        counts += torch.bincount((new * weights).sum(dim=1), minlength=VOCAB**HORIZON)
        accepted += target.speculation_stats.accepted
        rounds += target.speculation_stats.rounds
    return counts.reshape([VOCAB] * HORIZON), accepted / rounds


def chi_squared(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """p-value; cells that expect fewer than five draws are taken together."""
    want, got = expected.flatten() * counts.sum(), counts.flatten().double()
    if (got[want == 0] > 0).any():
        return 0.0
    large = want >= 5
    want = torch.cat((want[large], want[~large].sum()[None]))
    got = torch.cat((got[large], got[~large].sum()[None]))
    if want[-1] < 5:
        want, got = want[:-1], got[:-1]
        want = want * (got.sum() / want.sum())
    return float(stats.chisquare(got.numpy(), want.numpy()).pvalue)


def total_variation(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Distance of the drawn frequencies from `expected`, and what the distance of as many true draws would be."""
    n = int(counts.sum())
    distance = 0.5 * float((counts / n - expected).abs().sum())
    return distance, 0.5 * float((2 * expected * (1 - expected) / (math.pi * n)).sqrt().sum())


def fits(counts: torch.Tensor, expected: torch.Tensor) -> bool:
    distance, sampling_error = total_variation(counts, expected)
    return chi_squared(counts, expected) > 0.01 and distance < 1.3 * sampling_error


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_distribution(models, name, shape):
    target, draft = models
    options = SETTINGS[name]
    expected = exact_distribution(target, **options)
    assert expected.sum() == pytest.approx(1.0)
    assert (expected > 0.01).sum() > 8  # not a few sure texts
    # p > 0.01 fails once in a hundred by chance: a second, independent sample decides then.
    for seed in (0, 1):
        counts, accepted = draw(target, draft, SHAPES[shape], seed, **options)
        assert accepted > 0.1
        if fits(counts, expected):
            break
    else:
        pytest.fail(f"p = {chi_squared(counts, expected)}, distance and its error {total_variation(counts, expected)}")


def accept_the_draft(tree: Any, selected: torch.Tensor) -> Acceptance:
    """Wrong: takes the draft's first token whatever the target drew."""
    selected = selected.clone()
    selected[:, 0] = tree.tokens[:, 1]
    return accept(tree, selected)


def select_with_one_noise(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    """Wrong: all nodes of a row share their noise, so each token has the right chance and pairs haven't."""
    noise = -(-torch.rand(scores.shape[0], 1, scores.shape[-1]).log()).log()
    return (scores + noise).argmax(dim=-1)


def select_greedily_below_the_root(scores: torch.Tensor, do_sample: bool) -> torch.Tensor:
    drawn = select_tokens(scores, do_sample)
    drawn[:, 1:] = scores[:, 1:].argmax(dim=-1)
    return drawn


def without_processors(self: Any, scores: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return scores, None


def with_the_roots_text(original: Any) -> Any:
    """Wrong: processors see the committed text at every node, drafted tokens left out."""

    def groups(self: Any, tree: Any, ids: torch.Tensor, lengths: list[int]) -> Any:
        return [(index, prefix[:, : min(lengths)]) for index, prefix in original(self, tree, ids, lengths)]

    return groups


MUTATIONS = {
    "accepts the draft": (verifier, "accept", accept_the_draft, "T=1.0"),
    "shares its noise": (verifier, "select_tokens", select_with_one_noise, "T=1.0"),
    "is greedy below the root": (verifier, "select_tokens", select_greedily_below_the_root, "T=1.0"),
    "forgets the temperature": (processing.NodeProcessor, "__call__", without_processors, "T=0.7"),
    "forgets top-k": (processing.NodeProcessor, "__call__", without_processors, "top-k"),
    "forgets min-p": (processing.NodeProcessor, "__call__", without_processors, "min-p"),
    "penalises the root's text": (
        processing.NodeProcessor,
        "_groups",
        with_the_roots_text(processing.NodeProcessor._groups),
        "repetition",
    ),
}


@pytest.mark.parametrize(("mutation", "shape"), list(zip(MUTATIONS, itertools.cycle(["chain", "dynamic"]))))
def test_a_wrong_distribution_is_noticed(models, monkeypatch, mutation, shape):
    target, draft = models
    owner, name, wrong, setting = MUTATIONS[mutation]
    expected = exact_distribution(target, **SETTINGS[setting])
    monkeypatch.setattr(owner, name, wrong)
    counts, _ = draw(target, draft, SHAPES[shape], 0, **SETTINGS[setting])
    assert not fits(counts, expected)
    assert chi_squared(counts, expected) < 1e-4


def test_the_same_seed_gives_the_same_text(models):
    target, draft = models
    ids = torch.tensor([PROMPT])
    texts = []
    for seed in (0, 0, 1, 2):
        torch.manual_seed(seed)
        options = {"max_new_tokens": 20, "assistant_model": draft, **DYNAMIC, **sampling()}
        texts.append(target.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist())
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts}) == 3
