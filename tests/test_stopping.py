"""Generation ends where plain generation ends, at whatever place of a block that is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import (
    CHAIN,
    EOS,
    PAD,
    SHAPES,
    VOCAB,
    assert_same_as_plain,
    make_draft,
    make_target,
    oracle,
    prompts,
    texts_of,
)
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def plain_tokens(target: Any, inputs: dict[str, torch.Tensor], count: int = 24, row: int = 0) -> list[int]:
    out = target.generate(**inputs, do_sample=False, max_new_tokens=count)
    return out[row, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", range(1, 13))
def test_every_length_inside_a_block(llama, llama_draft, shape, count):
    inputs = prompts(3, 8)
    stats = assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=1.0, max_new_tokens=count)
    assert stats.generated == 3 * (count - 1)
    assert stats.rounds <= 3 * -(-(count - 1) // 2)
    assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=1.0, max_new_tokens=None, max_length=8 + count)


@pytest.mark.parametrize("shape", SHAPES)
def test_eos_at_every_place_of_a_block(llama, llama_draft, shape):
    inputs = prompts(1, 8)
    answer = plain_tokens(llama, inputs)
    places = {}
    for place, token in enumerate(answer):
        if token != PAD:
            places.setdefault(token, place)
    assert len(places) >= 5
    for token, place in places.items():
        options = {"eos_token_id": token, "pad_token_id": PAD}
        stats = assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=1.0, **options)
        assert stats.generated == place  # the first token is the prefill's


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ends", [[EOS, 7], [3, 4, 5], [8, 9, 10, 11, 12, 13]])
def test_several_eos_ids_and_rows_that_end_apart(llama, llama_draft, shape, ends):
    for seed in range(3):
        inputs = prompts(5, 9, seed)
        options = {"eos_token_id": ends, "pad_token_id": PAD, "max_new_tokens": 30}
        assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=0.9, seed=seed, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_that_ends_with_its_first_token(llama, llama_draft, shape):
    inputs = prompts(4, 9, seed=2)
    for row in range(4):
        first = plain_tokens(llama, inputs, 1, row)[0]
        options = {"eos_token_id": first, "pad_token_id": PAD}
        assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=0.9, **options)
    # All of them.
    firsts = [plain_tokens(llama, inputs, 1, row)[0] for row in range(4)]
    stats = assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], eos_token_id=firsts, pad_token_id=firsts[0])
    assert stats.rounds == 0
    assert stats.tau == 0.0


def test_num_return_sequences_are_rows(llama, llama_draft):
    inputs = prompts(2, 7)
    torch.manual_seed(0)
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9}
    out = llama.generate(**inputs, **options, assistant_model=llama_draft, **SHAPES["dynamic"])
    assert out.shape == (6, 16)
    assert out[:, :7].tolist() == inputs["input_ids"].repeat_interleave(3, dim=0).tolist()
    assert len(set(map(tuple, out.tolist()))) > 2
    # With one token allowed there is no chance, so plain and speculative must agree.
    only = assert_same_as_plain(
        llama, llama_draft, inputs, CHAIN, do_sample=True, num_return_sequences=3, top_k=1, max_new_tokens=12
    )
    assert only.accepted > only.rounds


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Tokens 0 to 11 are the letters a to l, the others two letters each."""
    pairs = [("a", "b"), ("c", "a"), ("h", "b"), ("d", "l")]
    words = [*"abcdefghijkl", *("".join(pair) for pair in pairs)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("shape", SHAPES)
def test_stop_strings(llama, llama_draft, shape):
    tokenizer = tiny_tokenizer()
    inputs = prompts(1, 8)
    text = tokenizer.decode(plain_tokens(llama, inputs))
    cut = 0
    for start in range(1, 12):
        stop = text[start : start + 2]
        options = {"stop_strings": [stop, "zz"], "tokenizer": tokenizer, "eos_token_id": EOS, "pad_token_id": PAD}
        stats = assert_same_as_plain(llama, llama_draft, inputs, SHAPES[shape], rate=1.0, **options)
        cut += stats.generated < 23
    assert cut > 5
    batch = prompts(4, 8, seed=3)
    for stop in ("ab", "d", "hca"):
        options = {"stop_strings": stop, "tokenizer": tokenizer, "eos_token_id": EOS, "pad_token_id": PAD}
        assert_same_as_plain(llama, llama_draft, batch, SHAPES[shape], rate=0.9, **options)


class Recorder(StoppingCriteria):
    """Writes down each text it is shown, row by row, and the scores that came with it."""

    def __init__(self, stop_sum: int = 10**9):
        self.stop_sum = stop_sum
        self.seen: list[set[tuple[int, ...]]] = []
        self.scores: dict[int, torch.Tensor] = {}

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        self.seen = self.seen or [set() for _ in input_ids]
        for row, text in enumerate(input_ids.tolist()):
            self.seen[row].add(tuple(text))
        if scores is not None:
            assert scores[-1].shape == (len(input_ids), VOCAB)
            assert len(scores) == len(scores[:])
            self.scores[len(scores)] = scores[-1]
        return input_ids[:, -3:].sum(dim=1) >= self.stop_sum


def without_end(text: Sequence[int]) -> list[int]:
    text = list(text)
    while text and text[-1] == PAD:
        text.pop()
    return text


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("stop_sum", [10**9, 30])
def test_custom_criteria_see_every_token_and_no_rejected_one(llama, llama_draft, shape, stop_sum):
    inputs = prompts(3, 9)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": 15, "pad_token_id": PAD}
    options |= {"suppress_tokens": [PAD]}  # so that padding is padding
    plain = llama.generate(**inputs, **options, stopping_criteria=[Recorder(stop_sum)])
    ours = Recorder(stop_sum)
    with oracle(texts_of(plain, inputs), 0.9):
        fast = llama.generate(
            **inputs, **options, stopping_criteria=[ours], assistant_model=llama_draft, **SHAPES[shape]
        )
    assert fast.tolist() == plain.tolist()
    assert llama.speculation_stats.accepted > 5
    rows = [without_end(row) for row in plain.tolist()]
    assert stop_sum > 30 or min(map(len, rows)) < 20
    for row, seen in zip(rows, ours.seen):
        assert {tuple(row[:width]) for width in range(10, len(row) + 1)} <= seen
        assert all(row[: len(without_end(text))] == without_end(text) for text in seen)


class Counter(StoppingCriteria):
    """Ends a row at a number of columns, which only works if each row is shown at its own width."""

    def __init__(self, columns: int):
        self.columns = columns

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.columns, dtype=torch.bool)


def test_criteria_that_count_columns(llama, llama_draft):
    for seed in range(4):
        for columns in (10, 14, 19):
            options = {"stopping_criteria": [Counter(columns)], "eos_token_id": EOS, "pad_token_id": PAD}
            assert_same_as_plain(llama, llama_draft, prompts(3, 9, seed), CHAIN, rate=0.7, seed=seed, **options)


def test_criteria_get_the_scores_of_each_step(llama, llama_draft):
    inputs = prompts(1, 9)
    options = {"do_sample": False, "max_new_tokens": 12, "return_dict_in_generate": True, "output_scores": True}
    plain, ours = Recorder(), Recorder()
    out = llama.generate(**inputs, **options, stopping_criteria=[plain]).sequences
    with oracle(texts_of(out, inputs), 0.9):
        llama.generate(**inputs, **options, stopping_criteria=[ours], assistant_model=llama_draft, **CHAIN)
    assert plain.scores.keys() == ours.scores.keys()
    for step, scores in plain.scores.items():
        torch.testing.assert_close(ours.scores[step], scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("limit", [12, 15, 40])
def test_a_length_criterion_of_the_users_takes_precedence(llama, llama_draft, limit):
    stats = assert_same_as_plain(
        llama, llama_draft, prompts(3, 9), CHAIN, max_new_tokens=20, stopping_criteria=[MaxLengthCriteria(limit)]
    )
    assert stats.generated == 3 * (limit - 10)


def test_an_eos_criterion_of_the_users_takes_precedence(llama, llama_draft):
    inputs = prompts(1, 9)
    answer = plain_tokens(llama, inputs)
    mine, theirs = answer[5], answer[2]
    assert mine not in answer[:5]
    options = {"eos_token_id": theirs, "pad_token_id": PAD, "stopping_criteria": [EosTokenCriteria(mine)]}
    stats = assert_same_as_plain(llama, llama_draft, inputs, CHAIN, rate=1.0, **options)
    assert stats.generated == 5


def test_max_time_ends_after_a_round(llama, llama_draft):
    class Slow(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
            time.sleep(0.02)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    inputs = prompts(2, 9)
    full = llama.generate(**inputs, do_sample=False, max_new_tokens=80)
    options = {"do_sample": False, "max_new_tokens": 80, "max_time": 0.15, "stopping_criteria": [Slow()]}
    out = llama.generate(**inputs, **options, assistant_model=llama_draft, **CHAIN)
    assert 9 < out.shape[1] < 70
    shortest = min(sum(row) for row in (out != PAD).tolist())
    assert shortest > 0
    # On a busy machine there is time for one token only.
    width = min(11, out.shape[1])
    assert out[0, :width].tolist() == full[0, :width].tolist()


def test_a_limit_far_away_costs_nothing(llama, llama_draft):
    inputs = prompts(1, 9)
    end = plain_tokens(llama, inputs)[5]
    options = {"eos_token_id": end, "pad_token_id": PAD, "max_new_tokens": 5_000_000_000}
    stats = assert_same_as_plain(llama, llama_draft, inputs, CHAIN, rate=1.0, **options)
    assert stats.generated == 5


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("limit", "attention"), [(22, "sdpa"), (23, "sdpa"), (24, "sdpa"), (25, "sdpa"), (25, "eager")]
)
def test_learned_positions_up_to_the_last_one(shape, limit, attention):
    target = make_target("gpt2", n_positions=24)
    target.set_attn_implementation(attention)
    draft = make_draft(target)
    # The token after the last position is the last plain generation can give.
    for batch, seed in ((1, 0), (3, 1), (3, 2), (3, 3)):
        # Rows that lag are drafted for while others stand at the end of the table.
        options = {"max_new_tokens": None, "max_length": limit, "rate": 1.0 if batch == 1 else 0.6}
        stats = assert_same_as_plain(target, draft, prompts(batch, 12, seed), SHAPES[shape], seed=seed, **options)
        assert stats.accepted > (stats.rounds / 3 if attention == "sdpa" else 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_rope_goes_on_past_the_position_limit(shape, batch):
    target = make_target("llama", max_position_embeddings=24)
    draft = make_draft(target)
    for seed in range(3):
        inputs = prompts(batch, 14, seed)
        stats = assert_same_as_plain(target, draft, inputs, SHAPES[shape], rate=0.95, seed=seed, max_new_tokens=36)
        assert stats.accepted > 0
        # Speculation ends at the limit: then each round gives one token.
        assert stats.rounds >= sum(length + 36 - 24 - 1 for length in inputs["attention_mask"].sum(1).tolist())


def test_prompt_past_the_position_limit():
    target = make_target("llama", max_position_embeddings=24)
    stats = assert_same_as_plain(target, make_draft(target), prompts(1, 30), CHAIN, rate=1.0)
    assert stats.drafted == 0


def test_prompt_as_long_as_the_limit_is_the_same_error(llama, llama_draft):
    inputs = prompts(1, 9)
    with pytest.raises(ValueError, match="length") as plain:
        llama.generate(**inputs, max_length=9)
    with pytest.raises(ValueError, match="length") as ours:
        llama.generate(**inputs, max_length=9, assistant_model=llama_draft)
    assert str(plain.value) == str(ours.value)
