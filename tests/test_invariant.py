"""DrafterInvariantSampling: a function of (seed, position), the target's distribution, one text for all drafts."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import scipy.stats
import torch
from rejection_tables import chi_squared
from support import SHAPES, config_of, make_draft, make_target, oracle, prompts, texts_of
from transformers import AutoModelForCausalLM, LogitsProcessorList, TemperatureLogitsWarper

from eagle3_hf import DrafterInvariantSampling
from eagle3_hf.decoding import invariant
from eagle3_hf.decoding.invariant import invariant_noise, mix

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix_by_hand(x: int) -> int:
    """SplitMix64's finaliser on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def noise_by_hand(seed: int, position: int, token: int) -> float:
    key = mix_by_hand((mix_by_hand((seed + GOLDEN) & WORD) + position * GOLDEN) & WORD)
    bits = mix_by_hand((key + (token + 1) * GOLDEN) & WORD) >> 11
    return -math.log(-math.log1p(-(bits + 0.5) / 2**53))


def test_noise_is_the_published_hash() -> None:
    # The first three outputs of SplitMix64 from state 0.
    states = torch.tensor([GOLDEN, 2 * GOLDEN & WORD, 3 * GOLDEN & WORD], dtype=torch.uint64).view(torch.int64)
    known = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix(states).view(torch.uint64).tolist() == known
    seeds, positions = torch.tensor([0, 1, -5, 2**62]), torch.tensor([0, 7, 1, 100_000])
    noise = invariant_noise(seeds, positions, 50)
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist())):
        expected = [noise_by_hand(seed, position, token) for token in range(50)]
        torch.testing.assert_close(noise[row], torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_noise_is_gumbel_and_independent() -> None:
    n = 400
    seeds = torch.arange(n).repeat_interleave(n)
    noise = invariant_noise(seeds, torch.arange(n).repeat(n), 3)
    assert scipy.stats.kstest(noise[:, 0].numpy()[:20_000], "gumbel_r").pvalue > 0.01
    grid = noise.view(n, n, 3)
    # Neighbouring seeds, positions and tokens: correlations of 160000 pairs have a deviation of 0.0025.
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid[..., 1:], grid[..., :-1])):
        assert abs(float(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1])) < 0.01


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_distribution_is_the_targets(do_sample: bool) -> None:
    torch.manual_seed(0)
    n, vocab = 40_000, 8
    scores = (2 * torch.randn(vocab)).expand(n, -1)
    out = DrafterInvariantSampling(range(n))(torch.zeros(n, 5, dtype=torch.long), scores)
    tokens = torch.multinomial(out.softmax(-1), 1)[:, 0] if do_sample else out.argmax(-1)
    counts = torch.bincount(tokens, minlength=vocab)
    assert chi_squared(counts, scores[0].double().softmax(0)) > 0.01


@pytest.fixture(scope="module")
def models() -> tuple[Any, list[Any]]:
    target = make_target("llama")
    return target, [make_draft(target, seed) for seed in (1, 2)]


SAMPLING = {"do_sample": True, "temperature": 1.3, "top_k": 12, "top_p": 0.95, "max_new_tokens": 20}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [SAMPLING, SAMPLING | {"repetition_penalty": 1.4}, {"max_new_tokens": 20}])
def test_one_text_for_every_draft_and_batch(models: Any, shape: str, options: dict[str, Any]) -> None:
    target, drafts = models
    inputs = prompts(8, 9)
    seed = DrafterInvariantSampling(7)
    plain = target.generate(**inputs, logits_processor=LogitsProcessorList([seed]), **options)
    texts = texts_of(plain, inputs)
    assert len({tuple(text[-20:]) for text in texts}) == 8
    draft = drafts[len(options) % 2]
    made = target.generate(
        **inputs, logits_processor=LogitsProcessorList([seed]), assistant_model=draft, **SHAPES[shape], **options
    )
    assert made.equal(plain)
    # With drafts that are often right, so that whole paths are accepted.
    with oracle(texts, 0.8):
        made = target.generate(
            **inputs, logits_processor=LogitsProcessorList([seed]), assistant_model=draft, **SHAPES[shape], **options
        )
    assert made.equal(plain)
    assert target.speculation_stats.tau > 1.5
    for row, text in enumerate(texts[::4]):
        alone = torch.tensor([text[:-20]])
        made = target.generate(
            input_ids=alone, logits_processor=LogitsProcessorList([seed]), assistant_model=drafts[0], **options
        )
        assert made[0].tolist() == text, row


def test_another_seed_is_another_text(models: Any) -> None:
    target, drafts = models
    inputs = prompts(2, 6)

    def texts(processor: Any) -> list:
        options = {"logits_processor": LogitsProcessorList([processor]), **SAMPLING}
        return target.generate(**inputs, assistant_model=drafts[0], **options).tolist()

    torch.manual_seed(0)
    first = texts(DrafterInvariantSampling(1))
    torch.manual_seed(99)  # torch's own generator has no say
    assert texts(DrafterInvariantSampling(1)) == first
    assert texts(DrafterInvariantSampling(2)) != first


def test_one_seed_a_row(models: Any) -> None:
    target, drafts = models
    prompt = prompts(1, 5)

    def run(seed: Any, **options: Any) -> list[list[int]]:
        processor = LogitsProcessorList([DrafterInvariantSampling(seed)])
        return target.generate(**prompt, logits_processor=processor, **SAMPLING, **options).tolist()

    many = run(range(4), num_return_sequences=4)
    assert len(set(map(tuple, many))) == 4
    assert run(range(4), num_return_sequences=4, assistant_model=drafts[0], **SHAPES["dynamic"]) == many
    assert [run(seed)[0] for seed in range(4)] == many
    assert len(set(map(tuple, run(3, num_return_sequences=4)))) == 1
    with pytest.raises(ValueError, match="2 seeds"):
        run([1, 2], num_return_sequences=4)


def test_rows_that_end_early_leave_the_others_alone(models: Any) -> None:
    target, drafts = models
    inputs = prompts(6, 7)
    options: dict[str, Any] = SAMPLING | {"eos_token_id": [3, 4]}
    processor = LogitsProcessorList([DrafterInvariantSampling(range(6))])
    plain = target.generate(**inputs, logits_processor=processor, **options)
    ends = Counter(int((row[7:] == 0).sum()) for row in plain)
    assert len(ends) > 2
    for shape in SHAPES.values():
        made = target.generate(**inputs, logits_processor=processor, assistant_model=drafts[1], **shape, **options)
        assert made.equal(plain)


def test_it_stands_behind_the_warpers(models: Any) -> None:
    # The likeliest token alone is left by top_k=1: noise that is added before would change that.
    target, _ = models
    inputs = prompts(3, 6)
    greedy = target.generate(**inputs, do_sample=False, max_new_tokens=10)
    options = {"do_sample": True, "top_k": 1, "max_new_tokens": 10}
    processor = LogitsProcessorList([DrafterInvariantSampling(0)])
    assert target.generate(**inputs, logits_processor=processor, **options).equal(greedy)


def fit_through_generate(models: Any) -> float:
    """p-value of two tokens over many seeds against the exact probabilities."""
    target, drafts = models
    prompt, n, temperature = torch.tensor([[5, 9, 4]]), 2000, 0.7
    first = (target(prompt).logits[0, -1] / temperature).softmax(-1)
    following = torch.cat((prompt.expand(16, -1), torch.arange(16)[:, None]), 1)
    exact = (first[:, None] * (target(following).logits[:, -1] / temperature).softmax(-1)).detach()
    made = target.generate(
        input_ids=prompt, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=2, num_return_sequences=n,
        logits_processor=LogitsProcessorList([DrafterInvariantSampling(range(n))]), assistant_model=drafts[0],
        **SHAPES["dynamic"],
    )  # fmt: skip
    return chi_squared(torch.bincount(made[:, 3] * 16 + made[:, 4], minlength=256), exact)


def test_distribution_through_generate(models: Any) -> None:
    assert fit_through_generate(models) > 0.01


def test_noise_that_ignores_the_position_shows(models: Any) -> None:
    wrong = mock.patch.object(
        invariant, "invariant_noise", lambda seeds, positions, vocab: invariant_noise(seeds, 0 * positions, vocab)
    )
    with wrong:
        assert fit_through_generate(models) < 1e-6


def test_positions_that_count_padding_show(models: Any) -> None:
    target, _ = models
    inputs = prompts(8, 9)
    options: dict[str, Any] = SAMPLING | {"logits_processor": LogitsProcessorList([DrafterInvariantSampling(7)])}
    with mock.patch.object(DrafterInvariantSampling, "for_batch", lambda self, mask: self):
        texts = texts_of(target.generate(**inputs, **options), inputs)
        alone = [target.generate(input_ids=torch.tensor([text[:-20]]), **options)[0].tolist() for text in texts]
    padded = [i for i, row in enumerate(inputs["attention_mask"]) if not row.all()]
    assert any(texts[i] != alone[i] for i in padded)


def test_with_an_untouched_model() -> None:
    # Without our mixin the warpers are passed by hand, and a padded batch is told of.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    model.generation_config.eos_token_id = None
    inputs = prompts(4, 9)
    seed = DrafterInvariantSampling(3)

    def run(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        processors = LogitsProcessorList([TemperatureLogitsWarper(1.4), seed.for_batch(mask)])
        return model.generate(
            input_ids=ids, attention_mask=mask, logits_processor=processors, do_sample=False, max_new_tokens=12
        )

    together = run(ids=inputs["input_ids"], mask=inputs["attention_mask"])
    for text in texts_of(together, inputs):
        prompt = torch.tensor([text[:-12]])
        assert run(prompt, torch.ones_like(prompt))[0].tolist() == text


@pytest.mark.parametrize("count", [1, 3])
def test_a_seed_too_few_or_too_many_is_named(models: Any, count: int) -> None:
    target, (draft, *_) = models
    for more in ({}, {"assistant_model": draft}):
        with pytest.raises(ValueError, match=f"{count} seeds were given for 2 rows"):
            target.generate(
                **prompts(2, 5), max_new_tokens=4, logits_processor=[DrafterInvariantSampling(range(count))], **more
            )


@pytest.mark.parametrize("nothing", [float("-inf"), float("nan")])
def test_a_row_without_a_token_is_refused_as_without_the_noise(models: Any, nothing: float) -> None:
    target, (draft, *_) = models

    def empty(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, nothing) if input_ids.shape[1] > 8 else scores

    for more in ({}, {"assistant_model": draft}, {"assistant_model": draft, "draft_sampling": "sample"}):
        with pytest.raises(RuntimeError, match="probability tensor"):
            target.generate(
                **prompts(2, 5),
                max_new_tokens=8,
                do_sample=True,
                logits_processor=[empty, DrafterInvariantSampling(3)],
                **more,
            )
