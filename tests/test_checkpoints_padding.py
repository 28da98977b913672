"""Padded and sharded drafts: the same tokens, and joining or cutting back changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from eagle3_hf import Eagle3Config, Eagle3DraftModel
from eagle3_hf.checkpoints.padding import PaddedRMSNorm, pad_draft, pad_segments, unpad_segments, unpad_state_dict
from eagle3_hf.checkpoints.sharding import (
    join_state_dicts,
    join_table,
    shard_state_dict,
    shard_table,
    vocabulary_range,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "qk_norm": {"qk_norm": True, "attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "two layers": {"num_hidden_layers": 2, "own_embeddings": True, "aux_hidden_state_layers": [1, 2, 3, 4]},
    "no final norm": {"final_norm": False},
    "wider target": {"target_hidden_size": 40, "own_embeddings": True},
}


def make(**changes: Any) -> Eagle3DraftModel:
    torch.manual_seed(0)
    values: dict[str, Any] = {
        "vocab_size": 50, "draft_vocab_size": 22, "hidden_size": 24, "intermediate_size": 32,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "initializer_range": 0.3,
    }  # fmt: skip
    draft = Eagle3DraftModel(Eagle3Config(**(values | changes))).eval()
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            # Fresh norms are all ones and fresh biases zero, which would hide a lost one.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    draft.set_draft_vocabulary(torch.randperm(50)[:22].sort().values)
    return draft


def chain(draft: Eagle3DraftModel, features: torch.Tensor, embeds: torch.Tensor, table: torch.Tensor):
    """Draft 6 tokens greedily; returns them and every step's logits."""
    cache = DynamicCache()
    out = draft(features, inputs_embeds=embeds, cache=cache)
    tokens, logits = [], [out.logits]
    state = out.last_hidden_state[:, -1:]
    for _ in range(6):
        tokens.append(int(draft.draft_to_target(logits[-1][0, -1].argmax())))
        out = draft(state, inputs_embeds=table[tokens[-1]][None, None], cache=cache, recurrent=True)
        state = out.last_hidden_state
        logits.append(out.logits)
    return tokens, torch.cat([each.flatten(0, 1) for each in logits])


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_padded_draft_gives_the_same_tokens(variant: str):
    draft = make(**VARIANTS[variant])
    config = draft.config
    same = config.hidden_size == config.target_hidden_size
    width, target_width = 32, 32 if same else 48
    padded = pad_draft(draft, width, target_width)
    assert padded.fc.weight.shape == (width, config.num_aux_hidden_states * target_width)
    features = torch.randn(1, 9, draft.fc.in_features)
    table = torch.randn(50, config.hidden_size)
    embeds = table[torch.randint(50, (1, 9))]
    tokens, logits = chain(draft, features, embeds, table)
    wide = pad_segments(features, 2, config.num_aux_hidden_states, target_width)
    wide_tokens, wide_logits = chain(padded, wide, pad_segments(embeds, 2, 1, width), pad_segments(table, 1, 1, width))
    assert wide_tokens == tokens
    assert len(set(tokens)) > 1
    torch.testing.assert_close(wide_logits, logits, rtol=1e-5, atol=1e-5)
    # The padding stays zero through the whole draft.
    state = padded(wide, inputs_embeds=pad_segments(embeds, 2, 1, width)).last_hidden_state
    assert not state[..., config.hidden_size :].any()
    cut = unpad_state_dict(
        padded.state_dict(), config.num_aux_hidden_states, config.hidden_size, config.target_hidden_size
    )
    assert all(torch.equal(cut[name], tensor) for name, tensor in draft.state_dict().items())
    assert set(cut) == set(draft.state_dict())


def test_gpt_oss_width():
    fc = torch.randn(5, 3 * 2880)
    padded = pad_segments(fc, 1, 3, 3072)
    assert padded.shape == (5, 3 * 3072)
    for i in range(3):
        assert torch.equal(padded[:, i * 3072 : i * 3072 + 2880], fc[:, i * 2880 : (i + 1) * 2880])
        assert not padded[:, i * 3072 + 2880 : (i + 1) * 3072].any()
    assert torch.equal(unpad_segments(padded, 1, 3, 2880), fc)


def test_norm_is_over_the_real_lanes():
    x, weight = torch.randn(3, 24), torch.randn(24)
    norm = PaddedRMSNorm(pad_segments(weight, 0, 2, 16), 1e-5, real=12, segments=2)
    expected = weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    out = norm(pad_segments(x, 1, 2, 16))
    assert torch.equal(unpad_segments(out, 1, 2, 12), expected)
    assert torch.equal(out, pad_segments(expected, 1, 2, 16))


def test_padding_errors():
    with pytest.raises(ValueError, match="length 10 can't be cut into 3"):
        pad_segments(torch.zeros(10), 0, 3, 8)
    with pytest.raises(ValueError, match="length 24 doesn't fit into 16"):
        pad_draft(make(), 16)
    with pytest.raises(ValueError, match="need own embeddings"):
        pad_draft(make(), 32, 48)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_joining_shards_is_exact(variant: str, world: int):
    draft = make(**VARIANTS[variant])
    state = draft.state_dict()
    shards = [shard_state_dict(state, draft.config, rank, world) for rank in range(world)]
    joined = join_state_dicts(shards, draft.config)
    assert set(joined) == set(state)
    assert all(torch.equal(joined[name], tensor) for name, tensor in state.items())
    assert {shard["lm_head.weight"].shape[0] for shard in shards} == {-(-22 // world)}


@pytest.mark.parametrize("world", [2, 4, 8])
@torch.no_grad()
def test_shards_compute_what_the_whole_does(world: int):
    """A layer, embedding and head run shard by shard, outputs joined as collectives would."""
    draft = make(attention_bias=True, mlp_bias=True)
    config, state, layer = draft.config, draft.state_dict(), draft.layers[0]
    shards = [shard_state_dict(state, config, rank, world) for rank in range(world)]
    x, h = torch.randn(1, 5, 2 * config.hidden_size), torch.randn(1, 5, config.hidden_size)
    rope = draft.rotary_emb(h, torch.arange(5)[None])
    attended, fed = torch.zeros_like(h), torch.zeros_like(h)
    heads, kv = config.num_attention_heads // world, max(1, config.num_key_value_heads // world)
    for shard in shards:
        small = make(
            attention_bias=True, mlp_bias=True, num_attention_heads=heads, num_key_value_heads=kv,
            intermediate_size=config.intermediate_size // world,
        ).layers[0]  # fmt: skip
        prefix = "layers.0."
        small.load_state_dict({n[len(prefix) :]: t for n, t in shard.items() if n.startswith(prefix)})
        attended += small.self_attn(x, rope, None, None)
        fed += small.mlp(h)
    torch.testing.assert_close(attended, layer.self_attn(x, rope, None, None), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fed, layer.mlp(h), rtol=1e-5, atol=1e-5)
    logits = torch.cat([F.linear(h, shard["lm_head.weight"]) for shard in shards], dim=-1)[..., :22]
    torch.testing.assert_close(logits, draft.lm_head(h))


@pytest.mark.parametrize(("size", "world"), [(10, 4), (9, 4), (5, 4), (8, 4), (3, 4)])
def test_table_shards_look_up_exactly(size: int, world: int):
    table, ids = torch.randn(size, 6), torch.arange(size)
    shards = [shard_table(table, rank, world) for rank in range(world)]
    assert len({shard.shape for shard in shards}) == 1
    assert torch.equal(join_table(shards, size), table)
    found = torch.zeros(size, 6)
    for rank, shard in enumerate(shards):
        first, last = vocabulary_range(size, rank, world)
        mine = (ids >= first) & (ids < last)
        found[mine] += shard[ids[mine] - first]
        assert not shard[last - first :].any()
    assert torch.equal(found, table)


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({}, 3, "num_attention_heads 8 can't be split over 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 2, "num_key_value_heads 3 can be neither"),
        ({"intermediate_size": 33}, 2, "intermediate_size 33"),
    ],
)
def test_sharding_errors(changes: dict[str, Any], world: int, message: str):
    draft = make(**changes)
    with pytest.raises(ValueError, match=message):
        shard_state_dict(draft.state_dict(), draft.config, 0, world)
    with pytest.raises(ValueError, match=r"rank 2 isn't in 0\.\.1"):
        shard_state_dict(make().state_dict(), make().config, 2, 2)
