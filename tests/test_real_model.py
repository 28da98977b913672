"""Short checks on SmolLM2-135M-Instruct with its shipped draft; the full ones are in test_real_acceptance.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.real

NEW_TOKENS = 48
SHAPES = {
    "chain": {"num_assistant_tokens": 4},
    "tree": {"num_assistant_tokens": 5, "tree_top_k": 4, "tree_total_tokens": 16},
}


@pytest.fixture(scope="module")
def questions(shared_prompts: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """One first turn of each of three MT-bench categories."""
    records = shared_prompts("mt_bench")
    return [records[i]["turns"][0] for i in (0, 30, 60)]


def encode(tokenizer: Any, questions: list[str]) -> dict[str, torch.Tensor]:
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in questions
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    return {name: inputs[name] for name in ("input_ids", "attention_mask")}


@pytest.fixture(scope="module")
def batch(smollm2: Any, questions: list[str]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The three prompts, left-padded, and plain generate's answers."""
    inputs = encode(smollm2.tokenizer, questions)
    return inputs, smollm2.target.generate(**inputs, do_sample=False, max_new_tokens=NEW_TOKENS)


def test_greedy_one_by_one(smollm2, questions):
    rounds, generated = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0)
    for question in questions:
        inputs = encode(smollm2.tokenizer, [question])
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
        plain = smollm2.target.generate(**inputs, **options)
        for name, shape in SHAPES.items():
            fast = smollm2.target.generate(**inputs, **options, assistant_model=smollm2.draft, **shape)
            assert fast.tolist() == plain.tolist()
            rounds[name] += smollm2.target.speculation_stats.rounds
            generated[name] += smollm2.target.speculation_stats.generated
    # A trained draft is right often enough: features, positions and vocabulary map reach it as in training.
    assert generated["chain"] / rounds["chain"] > 1.4
    assert generated["tree"] / rounds["tree"] > generated["chain"] / rounds["chain"]


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_in_a_batch(smollm2, batch, shape):
    inputs, plain = batch
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    fast = smollm2.target.generate(**inputs, **options, assistant_model=smollm2.draft, **SHAPES[shape])
    assert fast.tolist() == plain.tolist()
    assert smollm2.target.speculation_stats.tau > 1.4


def test_processors_and_stop_strings(smollm2, batch):
    inputs, _ = batch
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}
    options |= {"stop_strings": [". "], "tokenizer": smollm2.tokenizer}
    plain = smollm2.target.generate(**inputs, **options)
    fast = smollm2.target.generate(**inputs, **options, assistant_model=smollm2.draft, **SHAPES["tree"])
    assert fast.tolist() == plain.tolist()


def test_a_dtype_of_its_own_for_the_draft(smollm2, questions):
    from eagle3_hf import Eagle3DraftModel

    draft = Eagle3DraftModel.from_pretrained(smollm2.draft.name_or_path, dtype=torch.bfloat16)
    inputs = encode(smollm2.tokenizer, questions[:1])
    options = {"do_sample": False, "max_new_tokens": 24}
    plain = smollm2.target.generate(**inputs, **options)
    fast = smollm2.target.generate(**inputs, **options, assistant_model=draft, **SHAPES["chain"])
    assert fast.tolist() == plain.tolist()
