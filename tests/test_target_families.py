"""The checklist of docs/adding-a-target.md, for every registered family: capture, export of the class, same output.

To register a family, add a line to `FAMILIES`: a function that makes its smallest sensible configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import CHAIN, DYNAMIC, VOCAB, assert_same_as_plain, make_draft, prompts, texts_of
from transformers import AutoModelForCausalLM, PretrainedConfig

from eagle3_hf import AutoEagle3Target, disable_eagle3, enable_eagle3
from eagle3_hf.aux_layers import default_aux_layers, find_decoder

LAYERS, WINDOW = 8, 8
_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "max_position_embeddings": 96,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _make(config: str, without: tuple[str, ...] = (), **changes: Any) -> Callable[[], PretrainedConfig]:
    def make() -> PretrainedConfig:
        shape = {name: value for name, value in _SHAPE.items() if name not in without}
        return getattr(transformers, config)(**(shape | changes))

    return make


FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": _make("LlamaConfig"),
    "qwen2": _make("Qwen2Config", without=("head_dim",)),
    "qwen3": _make("Qwen3Config"),
    "qwen3_moe": _make("Qwen3MoeConfig", **_EXPERTS),
    "mistral": _make("MistralConfig", sliding_window=WINDOW),
    "mixtral": _make("MixtralConfig", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "gemma2": _make("Gemma2Config", query_pre_attn_scalar=8, **_MIXED),
    "gemma3": _make("Gemma3TextConfig", query_pre_attn_scalar=8, **_MIXED),
    "gpt_oss": _make("GptOssConfig", num_local_experts=4, num_experts_per_tok=2, **_MIXED),
    "phi3": _make("Phi3Config", without=("head_dim",), original_max_position_embeddings=96),
    "granite": _make("GraniteConfig", without=("head_dim",), embedding_multiplier=2.0, residual_multiplier=0.5),
    "olmo2": _make("Olmo2Config", without=("head_dim",)),
    "glm4": _make("Glm4Config"),
    "cohere2": _make("Cohere2Config", without=("head_dim",), **_MIXED),
    "smollm3": _make("SmolLM3Config", without=("head_dim",)),
    "llama4": _make(
        "Llama4TextConfig", num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=48,
        attention_chunk_size=16, interleave_moe_layer_step=2,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = AutoEagle3Target.from_config(FAMILIES[request.param](), attn_implementation="eager")
    made.generation_config.eos_token_id = None
    return made


def test_at_least_fifteen():
    assert len(FAMILIES) >= 15


def test_aux_states_are_the_layer_inputs(target: Any):
    inputs = prompts(2, 12, ragged=False)
    ids = list(range(LAYERS + 1))
    with torch.no_grad():
        expected = target(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        with target.capture_aux_hidden_states(ids) as capture:
            target(**inputs, use_cache=False)
        states = capture.take()
    assert len(expected) == LAYERS + 1
    for i in range(LAYERS):
        assert torch.equal(states[i], expected[i]), i
        assert i == 0 or not torch.equal(states[i], states[i - 1])
    # Id L is the input of the final norm; hidden_states[L] is its output.
    norm = find_decoder(target)[1]
    assert norm is not None
    torch.testing.assert_close(norm(states[LAYERS]), expected[LAYERS])
    assert not torch.allclose(states[LAYERS], expected[LAYERS])


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "tree"])
def test_greedy_output_is_the_same(shape: dict[str, Any], target: Any):
    draft = make_draft(target, aux_hidden_state_layers=list(default_aux_layers(LAYERS)))
    # Longer than the window and the chunk of the families that have one.
    stats = assert_same_as_plain(target, draft, prompts(2, 10), shape, max_new_tokens=20)
    assert stats.accepted > 0


def test_sampled_output_ends_in_time(target: Any):
    draft = make_draft(target, aux_hidden_state_layers=list(default_aux_layers(LAYERS)))
    inputs = prompts(1, 6)
    torch.manual_seed(0)
    out = target.generate(**inputs, assistant_model=draft, do_sample=True, max_new_tokens=7)
    assert [len(text) for text in texts_of(out, inputs)] == [13]
    assert int(out.max()) < VOCAB


def test_saves_as_its_own_class_and_can_be_undone(target: Any, tmp_path: Path):
    original = target._eagle3_original_class
    target.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is original
    assert type(disable_eagle3(target)) is original
    assert enable_eagle3(target) is target
