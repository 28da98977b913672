"""Fixtures: tiny random targets of several families, drafts for them, the real model and prompts where they exist."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Set before torch is imported: waiting threads that spin slow a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
import transformers
from support import FAMILIES, make_draft, make_target

ROOT = Path(__file__).parents[1]
REAL_DRAFT = ROOT / "recipes" / "smollm2-135m-instruct" / "draft"
PROMPTS = ROOT.parent / "shared" / "data" / "prompts"

transformers.utils.logging.set_verbosity_error()
# The models here are so small that a second thread only costs.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def targets() -> Callable[[str], Any]:
    """`targets("gemma3")`: the tiny target of that family, made once; tests leave it as it was."""
    made: dict[str, Any] = {}

    def target(family: str) -> Any:
        if family not in made:
            made[family] = make_target(family)
        return made[family]

    return target


@pytest.fixture(scope="session")
def drafts(targets: Callable[[str], Any]) -> Callable[[str], Any]:
    """`drafts("gemma3")`: a random draft for that target, made once."""
    made: dict[str, Any] = {}

    def draft(family: str) -> Any:
        if family not in made:
            made[family] = make_draft(targets(family))
        return made[family]

    return draft


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def llama(targets: Callable[[str], Any]) -> Any:
    """The tiny Llama target."""
    return targets("llama")


@pytest.fixture
def llama_draft(drafts: Callable[[str], Any]) -> Any:
    """A random draft for it."""
    return drafts("llama")


@pytest.fixture(scope="session")
def smollm2() -> Iterator[Any]:
    """SmolLM2-135M-Instruct in float32 with tokenizer and shipped draft: `.target`, `.tokenizer`, `.draft`."""
    from transformers import AutoTokenizer

    from eagle3_hf import AutoEagle3Target, Eagle3DraftModel, resolve_model

    if not (REAL_DRAFT / "config.json").is_file():
        pytest.skip(f"no trained draft in {REAL_DRAFT}")
    try:
        path = resolve_model("smollm2")
        target = AutoEagle3Target.from_pretrained(path, dtype=torch.float32)
    except OSError as error:
        pytest.skip(f"SmolLM2 isn't here: {error}")
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    draft = Eagle3DraftModel.from_pretrained(REAL_DRAFT, dtype=torch.float32)
    yield SimpleNamespace(target=target, draft=draft, tokenizer=AutoTokenizer.from_pretrained(path))
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def shared_prompts() -> Callable[[str], list[dict[str, Any]]]:
    """`shared_prompts("mt_bench")`: the records of that file, or the test is skipped where the file isn't there."""

    def read(name: str) -> list[dict[str, Any]]:
        path = PROMPTS / f"{name}.jsonl"
        if not path.is_file():
            pytest.skip(f"no prompts in {path}")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]

    return read
