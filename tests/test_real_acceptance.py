"""The promise on the real model, in full length: `pytest -m slow tests/test_real_acceptance.py`.

240 prompts of 128 tokens, as chain, fixed tree, dynamic tree and in ragged batches of eight, then prompts that cross
the model's last position. More than an hour on two cores, so CI runs the short forms in test_real_model.py;
`-k mt_bench`, `-k humaneval` and `-k gsm8k` run a set each.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model

ROOT = Path(__file__).parents[1]
DRAFT = ROOT / "recipes" / "smollm2-135m-instruct" / "draft"
PROMPTS = ROOT.parent / "shared" / "data" / "prompts"
SETS = ("mt_bench", "humaneval", "gsm8k")
COUNT, NEW_TOKENS = 80, 128
CHAIN = {"num_assistant_tokens": 4, "tree_top_k": 1, "tree_total_tokens": 4}
# Three children of the root, two of each of them, one of each of those: 15 nodes.
STATIC = {"tree_paths": [(a, b, 0)[:n] for n in (1, 2, 3) for a in range(3) for b in range(2 if n > 1 else 1)]}
DYNAMIC = {"num_assistant_tokens": 5, "tree_top_k": 4, "tree_total_tokens": 16}
METHODS = {"chain": (CHAIN, 1), "static": (STATIC, 1), "dynamic": (DYNAMIC, 1), "batch-8": (DYNAMIC, 8)}

log = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(not DRAFT.exists(), reason=f"no trained draft in {DRAFT}"),
    pytest.mark.skipif(not PROMPTS.exists(), reason=f"no prompts in {PROMPTS}"),
]


class Models:
    """SmolLM2 untouched and as target, its draft, and what the untouched one answers, made once."""

    def __init__(self) -> None:
        path = resolve_model("smollm2")
        self.plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.target = AutoEagle3Target.from_pretrained(path, dtype=torch.float32)
        self.draft = Eagle3DraftModel.from_pretrained(DRAFT)
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        self.texts: dict[str, list[list[int]]] = {}

    def prompts(self, name: str) -> list[str]:
        rows = [json.loads(line) for line in (PROMPTS / f"{name}.jsonl").open()][:COUNT]
        return [row["turns"][0] if "turns" in row else row["prompt"] for row in rows]

    def encode(self, text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        rendered = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(rendered, add_special_tokens=False).input_ids

    def expected(self, ids: list[int]) -> list[int]:
        row = torch.tensor([ids])
        out = self.plain.generate(row, attention_mask=torch.ones_like(row), **self.settings)
        return out[0, len(ids) :].tolist()

    def of_set(self, name: str) -> tuple[list[list[int]], list[list[int]]]:
        prompts = [self.encode(text) for text in self.prompts(name)]
        if name not in self.texts:
            self.texts[name] = [self.expected(ids) for ids in prompts]
        return prompts, self.texts[name]


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


def assert_identical(
    models: Models, prompts: list[list[int]], texts: list[list[int]], batch: int = 1, **options: Any
) -> None:
    """Each prompt's text, alone or in a left-padded batch, is what the untouched model gives for that prompt alone."""
    generated = rounds = 0
    different = []
    pad = models.target.generation_config.pad_token_id or 0
    for start in range(0, len(prompts), batch):
        group = prompts[start : start + batch]
        width = max(map(len, group))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in group])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in group])
        out = models.target.generate(
            ids, attention_mask=mask, assistant_model=models.draft, **models.settings, **options
        )
        for number, row in enumerate(out[:, width:].tolist(), start):
            text = texts[number]
            # Behind a text that ended early is padding, up to the longest of its batch.
            if row[: len(text)] != text or set(row[len(text) :]) - {pad}:
                different.append(number)
        generated += models.target.speculation_stats.generated
        rounds += models.target.speculation_stats.rounds
    log.info("%d prompts, %d tokens, %d rounds: tau %.2f", len(prompts), generated, rounds, generated / rounds)
    assert not different, f"prompts {different} of {len(prompts)} differ from plain generate()"
    # Nothing is shown if nothing was accepted.
    assert generated / rounds > 1.2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SETS)
def test_identical(models: Models, name: str, method: str) -> None:
    prompts, texts = models.of_set(name)
    assert len(prompts) == COUNT
    options, batch = METHODS[method]
    assert_identical(models, prompts, texts, batch, **options)


def test_long_prompts_are_identical_across_position_2048(models: Models) -> None:
    turns = models.prompts("mt_bench")
    prompts = []
    for number in range(20):
        others, text = turns[number + 1 :] + turns[:number], turns[number]
        while len(models.encode(text)) < 1900:
            text = f"{others.pop(0)}\n\n{text}"
        prompts.append(models.encode(text)[-1990:])
    assert all(1900 <= len(ids) <= 1990 for ids in prompts)
    assert any(len(ids) + NEW_TOKENS > 2048 for ids in prompts)
    assert_identical(models, prompts, [models.expected(ids) for ids in prompts])
