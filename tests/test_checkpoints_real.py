"""The shipped SmolLM2 draft, exported to each layout and loaded back: the same text, the same acceptance."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model
from eagle3_hf.checkpoints import FORMATS, export_draft
from eagle3_hf.checkpoints.probe import probe_draft
from eagle3_hf.cli.common import encode
from eagle3_hf.cli.probe import _PROMPTS
from eagle3_hf.target import check_draft_fits

SHIPPED = Path(__file__).resolve().parents[1] / "recipes" / "smollm2-135m-instruct" / "draft"
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not (SHIPPED / "config.json").is_file(), reason=f"no draft in {SHIPPED}"),
]


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    path = resolve_model("smollm2")
    return AutoEagle3Target.from_pretrained(path, dtype=torch.float32), AutoTokenizer.from_pretrained(path)


def acceptance(model: tuple[Any, Any], draft: Eagle3DraftModel, count: int, tokens: int) -> list[tuple[Any, ...]]:
    target, tokenizer = model
    found = []
    for text in _PROMPTS[:count]:
        inputs = encode(tokenizer, text, target.device)
        out = target.generate(
            **inputs,
            assistant_model=draft,
            max_new_tokens=tokens,
            do_sample=False,
            num_assistant_tokens=4,
            tree_top_k=1,  # exports carry weights and config, not how to draft
        )
        stats = target.speculation_stats
        found.append((out.tolist(), stats.accepted, stats.drafted, stats.rounds))
    return found


@pytest.mark.parametrize("offset", [pytest.param(-1, marks=pytest.mark.slow), 1])
def test_ids_saved_off_by_one_are_named(offset: int, model: tuple[Any, Any], tmp_path: Path):
    target, tokenizer = model
    shutil.copytree(SHIPPED, tmp_path / "draft")
    file = tmp_path / "draft" / "config.json"
    config = json.loads(file.read_text())
    right = list(check_draft_fits(target, Eagle3DraftModel.from_pretrained(SHIPPED)))
    config["aux_hidden_state_layers"] = [i + offset for i in right]
    file.write_text(json.dumps(config))
    wrong = Eagle3DraftModel.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    prompts = [encode(tokenizer, text, target.device)["input_ids"] for text in _PROMPTS]
    verdict = probe_draft(target, wrong, prompts, 64, offsets=(-1, 1), enough=len(prompts) // 2)
    assert verdict.best == f"aux ids {-offset:+d}", verdict.text
    assert verdict.text.startswith("the aux ids are off")
    assert f"aux_hidden_state_layers={right}" in verdict.text


@pytest.mark.parametrize(
    ("count", "tokens"), [pytest.param(2, 12), pytest.param(10, 32, marks=pytest.mark.slow)], ids=["2", "10"]
)
def test_exports_accept_alike(count: int, tokens: int, model: tuple[Any, Any], tmp_path: Path):
    shipped = Eagle3DraftModel.from_pretrained(SHIPPED, dtype="auto")
    expected = acceptance(model, Eagle3DraftModel.from_pretrained(SHIPPED, dtype=torch.float32), count, tokens)
    assert sum(accepted for _, accepted, _, _ in expected) > 0
    for format in FORMATS:
        export_draft(shipped, tmp_path / format, format)
        again = Eagle3DraftModel.from_pretrained(tmp_path / format, dtype=torch.float32)
        assert again.provenance.family == format
        assert acceptance(model, again, count, tokens) == expected, format
