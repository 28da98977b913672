"""Drafter-invariance on the real model, in full length: `pytest -m slow tests/test_invariant_real.py`.

50 prompts of 64 tokens at temperature 1: the same text with the trained draft, a random one and none, as chain and as
tree, one prompt at a time and eight. About an hour on two cores. `EAGLE3_HF_TEST_DRAFT` names another draft folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessorList

from eagle3_hf import AutoEagle3Target, DrafterInvariantSampling, Eagle3DraftModel, resolve_model

ROOT = Path(__file__).parents[1]
DRAFT = Path(os.environ.get("EAGLE3_HF_TEST_DRAFT") or ROOT / "recipes" / "smollm2-135m-instruct" / "draft")
PROMPTS = ROOT.parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"
COUNT, NEW_TOKENS = 50, 64
SHAPES = {"chain": {"num_assistant_tokens": 3, "tree_top_k": 1}, "tree": {"num_assistant_tokens": 3, "tree_top_k": 2}}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(not DRAFT.exists(), reason=f"no trained draft in {DRAFT}"),
    pytest.mark.skipif(not PROMPTS.exists(), reason=f"no prompts in {PROMPTS}"),
]


class Models:
    """Target, drafts and tokenizer, and the texts that need no draft."""

    def __init__(self) -> None:
        path = resolve_model("smollm2")
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.target = AutoEagle3Target.from_pretrained(path, dtype=torch.float32)
        trained = Eagle3DraftModel.from_pretrained(DRAFT)
        torch.manual_seed(0)
        self.drafts = {"trained": trained, "random": Eagle3DraftModel(trained.config).eval(), "none": None}
        turns = [json.loads(line)["turns"][0] for line in PROMPTS.open()][:COUNT]
        self.prompts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}], tokenize=False, add_generation_prompt=True
            )
            for turn in turns
        ]
        self.plain: list[list[int]] | None = None

    def texts(self, draft: str, batch: int, **drafting: Any) -> list[list[int]]:
        out: list[list[int]] = []
        for start in range(0, len(self.prompts), batch):
            group = self.prompts[start : start + batch]
            inputs = self.tokenizer(group, return_tensors="pt", padding=True, add_special_tokens=False)
            made = self.target.generate(
                **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0,
                max_new_tokens=NEW_TOKENS, assistant_model=self.drafts[draft], **drafting,
                logits_processor=LogitsProcessorList([DrafterInvariantSampling(11)]),
            )  # fmt: skip
            # What stands behind the end of a text is padding, as many tokens as the batch asks for.
            ends = self.target.generation_config.eos_token_id
            ends = ends if isinstance(ends, list) else [ends]
            for row in made[:, inputs["input_ids"].shape[1] :].tolist():
                stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                out.append(row[:stop])
        return out


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.mark.parametrize("batch", [8, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("draft", ["none", "trained", "random"])
def test_one_text(models: Models, draft: str, shape: str, batch: int) -> None:
    if models.plain is None:
        models.plain = models.texts("none", 8)
    if draft == "none" and (shape == "tree" or batch == 8):
        pytest.skip("without a draft there is no shape, and batch 8 is what the others are compared with")
    made = models.texts(draft, batch, **({} if draft == "none" else SHAPES[shape]))
    different = [i for i, (a, b) in enumerate(zip(made, models.plain)) if a != b]
    assert not different, f"prompts {different} of {len(made)} differ"
    assert sum(map(len, made)) > COUNT * NEW_TOKENS / 2
