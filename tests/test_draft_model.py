"""The draft model: every variant runs, caches, saves and speculates; two modes told apart by word, not by shape."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import CHAIN, DYNAMIC, STATIC, VOCAB, assert_same_as_plain, make_draft, prompts
from transformers import AutoConfig, AutoModel, DynamicCache

from eagle3_hf import Eagle3Config, Eagle3DraftModel, SpeculativeCache

LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **values}}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "no final norm": {"final_norm": False},
    "qk_norm": {"qk_norm": True},
    "biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "two layers": {"num_hidden_layers": 2},
    "own embeddings": {"own_embeddings": True},
    "own width": {"own_embeddings": True, "hidden_size": 24, "target_hidden_size": 32, "head_dim": 8},
    "wide heads": {"head_dim": 12, "num_key_value_heads": 1},
    "one aux state": {"aux_hidden_state_layers": [2]},
    "full vocabulary": {"draft_vocab_size": VOCAB},
    "default rope": rope("default"),
    "linear rope": rope("linear", factor=2.0),
    "dynamic rope": rope("dynamic", factor=2.0) | {"max_position_embeddings": 16},
    "yarn rope": rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama3 rope": rope("llama3", factor=8.0, **LLAMA3),
    "long rope": rope("longrope", factor=4.0, original_max_position_embeddings=16, **LONG),
    "older form of rope": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "everything": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "qk_norm": True,
                   "attention_bias": True, "num_hidden_layers": 2, "own_embeddings": True},
}  # fmt: skip


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, llama: Any) -> Any:
    draft = make_draft(llama, **VARIANTS[request.param])
    # Norms start as ones and biases as zeros, which would hide that they are used.
    generator = torch.Generator().manual_seed(1)
    for name, parameter in draft.named_parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = parameter.data + (0.3 * noise if "norm" in name else noise)
    draft.name = request.param
    return draft


def inputs_of(draft: Any, length: int = 10, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    config = draft.config
    features = torch.randn(batch, length, config.num_aux_hidden_states * config.target_hidden_size, generator=generator)
    return {
        "hidden_states": features,
        "inputs_embeds": torch.randn(batch, length, config.hidden_size, generator=generator),
    }


def part(inputs: dict[str, torch.Tensor], start: int, end: int) -> dict[str, torch.Tensor]:
    return {name: value[:, start:end] for name, value in inputs.items()}


@torch.no_grad()
def test_forward_and_cache(variant):
    inputs = inputs_of(variant)
    whole = variant(**inputs)
    assert whole.logits.shape == (2, 10, variant.config.draft_vocab_size)
    assert whole.last_hidden_state.shape == (2, 10, variant.config.hidden_size)
    assert torch.isfinite(whole.logits).all()
    state = whole.last_hidden_state
    normed = state if variant.config.norm_output else variant.norm(state)
    torch.testing.assert_close(variant.lm_head(normed), whole.logits)
    # Causal: what comes later doesn't matter.
    torch.testing.assert_close(variant(**part(inputs, 0, 6)).logits, whole.logits[:, :6], atol=1e-4, rtol=1e-4)
    for cuts in ((0, 4, 10), (0, 1, 2, 7, 8, 9, 10)):
        theirs, ours = DynamicCache(), SpeculativeCache(variant.config.num_hidden_layers)
        for start, end in itertools.pairwise(cuts):
            ours.begin_write(None, end - start, batch=2)
            for cache in (theirs, ours):
                step = variant(**part(inputs, start, end), cache=cache)
                torch.testing.assert_close(step.logits, whole.logits[:, start:end], atol=1e-4, rtol=1e-4)
            ours.set_lengths([end, end])
    rows = torch.tensor([1, 7])
    torch.testing.assert_close(variant(**inputs, logits_to_keep=rows).logits, whole.logits[:, rows])
    torch.testing.assert_close(variant(**inputs, logits_to_keep=2).logits, whole.logits[:, -2:])
    assert variant(**inputs, logits_to_keep=None).logits is None


@torch.no_grad()
def test_every_parameter_is_used(variant):
    inputs = inputs_of(variant)
    if variant.config.own_embeddings:
        inputs["input_ids"] = torch.arange(20).view(2, 10) % VOCAB
        del inputs["inputs_embeds"]
    before = variant(**inputs).logits
    for name, parameter in variant.named_parameters():
        kept = parameter.clone()
        parameter.add_(torch.randn(parameter.shape))
        after = variant(**inputs).logits
        assert not torch.allclose(before, after, atol=1e-5), name
        parameter.copy_(kept)
    torch.testing.assert_close(variant(**inputs).logits, before)


@torch.no_grad()
def test_eager_equals_sdpa(variant):
    inputs = inputs_of(variant)
    assert variant.config._attn_implementation == "sdpa"
    sdpa = variant(**inputs).logits
    cache = DynamicCache()
    variant(**part(inputs, 0, 5), cache=cache)
    later = variant(**part(inputs, 5, 10), cache=cache).logits
    variant.set_attn_implementation("eager")
    torch.testing.assert_close(variant(**inputs).logits, sdpa, atol=1e-4, rtol=1e-4)
    cache = DynamicCache()
    variant(**part(inputs, 0, 5), cache=cache)
    torch.testing.assert_close(variant(**part(inputs, 5, 10), cache=cache).logits, later, atol=1e-4, rtol=1e-4)


def test_speculation_is_lossless(variant, llama):
    for shape in (CHAIN, DYNAMIC, STATIC):
        assert assert_same_as_plain(llama, variant, prompts(2, 9), shape, max_new_tokens=16).accepted > 8


def test_save_and_load(variant, tmp_path):
    variant.save_pretrained(tmp_path)
    again = Eagle3DraftModel.from_pretrained(tmp_path)
    state, restored = variant.state_dict(), again.state_dict()
    assert state.keys() == restored.keys()
    assert all(torch.equal(state[key], restored[key]) for key in state)
    assert not again.training
    inputs = inputs_of(variant)
    assert torch.equal(again(**inputs).logits, variant(**inputs).logits)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), Eagle3Config)
    assert type(AutoModel.from_pretrained(tmp_path)) is Eagle3DraftModel


def test_the_mode_is_said_not_guessed(llama):
    # One aux state as wide as the draft: both modes take the same shape and mean different things.
    draft = make_draft(llama, aux_hidden_state_layers=[2])
    x, embeds = torch.randn(1, 3, 32), torch.randn(1, 3, 32)
    first, recurrent = draft(x, inputs_embeds=embeds), draft(x, inputs_embeds=embeds, recurrent=True)
    assert not torch.allclose(first.logits, recurrent.logits)
    fused = draft(draft.fc(x), inputs_embeds=embeds, recurrent=True)
    torch.testing.assert_close(fused.logits, first.logits)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"hidden_states": torch.zeros(1, 2, 32)}, ValueError, "target features must be 96 wide, got 32"),
        ({"recurrent": True}, ValueError, "recurrent states must be 32 wide, got 96"),
        ({"input_ids": torch.zeros(1, 2, dtype=torch.long)}, ValueError, "exactly one"),
        ({"inputs_embeds": None}, ValueError, "exactly one"),
        (
            {"inputs_embeds": None, "input_ids": torch.zeros(1, 2, dtype=torch.long)},
            ValueError,
            "no embeddings of its own",
        ),
        ({"use_cache": True}, TypeError, "use_cache"),
    ],
)
def test_wrong_arguments(llama_draft, arguments, error, words):
    usual = {"hidden_states": torch.zeros(1, 2, 96), "inputs_embeds": torch.zeros(1, 2, 32)}
    with pytest.raises(error, match=words):
        llama_draft(**(usual | arguments))


@pytest.mark.parametrize("key", ["fc.weight", "d2t", "layers.0.hidden_norm.weight", "lm_head.weight"])
def test_incomplete_and_overfull_checkpoints_name_the_key(llama, tmp_path, key):
    draft = make_draft(llama)
    draft.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    save_file({name: value for name, value in whole.items() if name != key}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=key):
        Eagle3DraftModel.from_pretrained(tmp_path)
    save_file(whole | {f"more.{key}": whole[key].clone()}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"more.{key}"):
        Eagle3DraftModel.from_pretrained(tmp_path)
    save_file(whole, path, metadata={"format": "pt"})
    assert torch.equal(Eagle3DraftModel.from_pretrained(tmp_path).fc.weight, draft.fc.weight)


def test_wrong_sizes_in_a_checkpoint(llama, tmp_path):
    make_draft(llama).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"draft_vocab_size": 9}))
    with pytest.raises((ValueError, RuntimeError), match=r"lm_head.weight|size mismatch|mismatched"):
        Eagle3DraftModel.from_pretrained(tmp_path)


def test_draft_vocabulary(llama):
    draft = make_draft(llama, draft_vocab_size=4)
    draft.set_draft_vocabulary(torch.tensor([1, 5, 6, 15]))
    assert draft.draft_to_target(torch.tensor([[0, 3], [2, 1]])).tolist() == [[1, 15], [6, 5]]
    assert draft.t2d.nonzero()[:, 0].tolist() == [1, 5, 6, 15]
    for ids, words in (([1, 2, 3], "4 token ids"), ([1, 1, 2, 3], "ascending"), ([1, 2, 3, 16], "below vocab_size 16")):
        with pytest.raises(ValueError, match=words):
            draft.set_draft_vocabulary(torch.tensor(ids))
    inputs = prompts(2, 8)
    assert assert_same_as_plain(llama, draft, inputs, DYNAMIC | {"tree_top_k": 9}, rate=1.0).accepted > 5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"draft_vocab_size": 17}, r"draft_vocab_size 17 .*\(16, "),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 .* 3"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"target_hidden_size": 64}, "32 .* 64.*own_embeddings"),
        ({"num_hidden_layers": 0}, "at least 1"),
    ],
)
def test_contradicting_sizes(values, words):
    usual = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=words):
        Eagle3Config(**(usual | values))


def test_positions_past_the_trained_length(llama):
    draft = make_draft(llama, max_position_embeddings=8)
    inputs = inputs_of(draft, length=40)
    assert torch.isfinite(draft(**inputs).logits).all()
    assert assert_same_as_plain(llama, draft, prompts(1, 30), CHAIN, max_new_tokens=30).accepted > 8
