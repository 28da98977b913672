"""The slice's promise on the real model, in full length: `pytest -m slow tests/test_real_acceptance.py`.

Minutes each on two cores, so CI runs the short forms in test_real_model.py instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model

ROOT = Path(__file__).parents[1]
DRAFT = ROOT / "recipes" / "smollm2-135m-instruct" / "draft"
PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"
NEW_TOKENS = 128

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(not DRAFT.exists(), reason=f"no trained draft in {DRAFT}"),
    pytest.mark.skipif(not PROMPTS.exists(), reason=f"no prompts in {PROMPTS}"),
]


@pytest.fixture(scope="module")
def models():
    path = resolve_model("smollm2")
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    target = AutoEagle3Target.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), plain, target, Eagle3DraftModel.from_pretrained(DRAFT)


def first_turns() -> list[str]:
    return [json.loads(line)["turns"][0] for line in PROMPTS.open()]


def encode(tokenizer, text: str) -> torch.Tensor:
    chat = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids


def assert_identical(models, prompts: list[torch.Tensor], **options) -> None:
    _, plain, target, draft = models
    generated = rounds = 0
    different = []
    for number, ids in enumerate(prompts):
        settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        expected = plain.generate(ids, **settings)
        got = target.generate(ids, **settings, assistant_model=draft, **options)
        if not torch.equal(expected, got):
            different.append(number)
        generated += target.speculation_stats.generated
        rounds += target.speculation_stats.rounds
    assert not different, f"prompts {different} of {len(prompts)} differ from plain generate()"
    # Nothing is shown if nothing was accepted.
    assert generated / rounds > 1.2


def test_all_mt_bench_first_turns_are_identical(models) -> None:
    prompts = [encode(models[0], text) for text in first_turns()]
    assert len(prompts) == 80
    assert_identical(models, prompts)


def test_long_prompts_are_identical_across_position_2048(models) -> None:
    tokenizer, turns = models[0], first_turns()
    prompts = []
    for number in range(20):
        others, text = turns[number + 1 :] + turns[:number], turns[number]
        while encode(tokenizer, text).shape[1] < 1900:
            text = f"{others.pop(0)}\n\n{text}"
        prompts.append(encode(tokenizer, text)[:, -1990:])
    assert all(1900 <= ids.shape[1] <= 1990 for ids in prompts)
    assert any(ids.shape[1] + NEW_TOKENS > 2048 for ids in prompts)
    assert_identical(models, prompts)
