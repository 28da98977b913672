"""Long prompts, windows left far behind and scaled positions: token for token what plain `generate()` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import LAYERS, SHAPES, assert_same_as_plain, config_of, make_draft, make_target, oracle, prompts, texts_of
from transformers import AutoModelForCausalLM

from eagle3_hf import enable_eagle3
from eagle3_hf.compat import IS_V5
from eagle3_hf.families import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

LONG = 4096


@pytest.fixture(scope="module")
def long_llama() -> tuple[Any, Any]:
    target = make_target("llama", max_position_embeddings=2 * LONG, num_hidden_layers=2)
    return target, make_draft(target, aux_hidden_state_layers=[0, 1, 2])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_prompt_of_4096_tokens(long_llama, shape):
    target, draft = long_llama
    stats = assert_same_as_plain(target, draft, prompts(1, LONG), SHAPES[shape], max_new_tokens=24)
    assert stats.accepted > 5


def test_a_batch_of_4096_tokens_and_less(long_llama):
    target, draft = long_llama
    inputs = prompts(3, LONG)
    for row, pad in enumerate((0, 1500, 4090)):
        inputs["attention_mask"][row] = (torch.arange(LONG) >= pad).long()
    inputs["input_ids"][inputs["attention_mask"] == 0] = 0
    assert assert_same_as_plain(target, draft, inputs, SHAPES["dynamic"], max_new_tokens=16).accepted > 10


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text"])
def test_far_past_the_window(family):
    # Windows of 8 and chunks of 16 tokens, left behind dozens of times.
    config = FAMILIES[family].tiny_config()
    config.max_position_embeddings = 1024
    torch.manual_seed(0)
    attention = {"attn_implementation": "eager"} if family in ("gpt_oss", "gemma2") else {}
    target = enable_eagle3(AutoModelForCausalLM.from_config(config, **attention).eval())
    target.generation_config.eos_token_id = None
    draft = make_draft(target, aux_hidden_state_layers=[1, 4, 8])
    for i, (shape, batch) in enumerate([("chain", 1), ("static", 2), ("dynamic", 3)]):
        inputs = prompts(batch, 400, seed=i, ragged=False)
        if batch == 3:
            inputs["attention_mask"][1, :250] = inputs["attention_mask"][2, :397] = 0
        stats = assert_same_as_plain(target, draft, inputs, SHAPES[shape], max_new_tokens=30)
        assert stats.accepted > 10


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "dynamic": {"factor": 8.0},
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0], "factor": 8.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def scaled(kind: str) -> Any:
    config = config_of("llama", max_position_embeddings=64 if kind == "dynamic" else 512)
    rope = {"rope_type": kind, **ROPES[kind]}
    config.rope_scaling = dict(rope)
    if IS_V5:
        config.rope_parameters = rope | {"rope_theta": 10000.0}
    config.original_max_position_embeddings = 64
    torch.manual_seed(0)
    target = enable_eagle3(AutoModelForCausalLM.from_config(config).eval())
    target.generation_config.eos_token_id = None
    return target


def same_from_the_same_state(target: Any, draft: Any, inputs: dict[str, torch.Tensor], shape: dict[str, Any]) -> Any:
    """transformers' dynamic RoPE keeps what the longest text so far made of it, until a short text takes it back."""
    short = torch.ones(1, 4, dtype=torch.long)
    target(short)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=24)
    target(short)
    with oracle(texts_of(plain, inputs)):
        fast = target.generate(**inputs, do_sample=False, max_new_tokens=24, assistant_model=draft, **shape)
    assert fast.tolist() == plain.tolist()
    return target.speculation_stats


@pytest.mark.parametrize("place", ["below", "across", "past"])
@pytest.mark.parametrize("kind", ROPES)
def test_scaled_positions(kind, place):
    """Texts that stay below the original length, grow across it, or lie past it from the start."""
    target = scaled(kind)
    draft = make_draft(target, aux_hidden_state_layers=[1, 2, LAYERS])
    width = {"below": 24, "across": 50, "past": 200}[place]
    for batch in (1, 3):
        inputs = prompts(batch, width, ragged=False)
        if batch == 3:
            inputs["attention_mask"][1, : width // 3] = 0
        for shape in SHAPES.values():
            if place == "across" and (kind == "longrope" or (kind == "dynamic" and batch > 1)):
                with pytest.raises(ValueError, match=f"the target's {kind} RoPE rotates differently past position 64"):
                    target.generate(**inputs, assistant_model=draft, max_new_tokens=24, **shape)
                continue
            if place == "past" and kind == "dynamic" and batch > 1:
                with pytest.raises(ValueError, match="the target's dynamic RoPE rotates differently with every length"):
                    target.generate(**inputs, assistant_model=draft, max_new_tokens=24, **shape)
                continue
            stats = same_from_the_same_state(target, draft, inputs, shape)
            # Past the place where dynamic RoPE changes, a row is decoded token by token.
            assert stats.accepted > 5 or kind == "dynamic"
    assert kind != "dynamic" or place != "below" or stats.accepted > 5
