"""Static graphs, uncompiled: the same tokens as plain `generate()`, the same drafts as the eager draft."""

import random
from unittest import mock

import pytest
import torch
from neuron_support import BUCKETS, DRAFTS, LENGTH, assert_same_as_plain, in_process, make_pair
from scipy.stats import chisquare
from support import PAD, config_of, make_draft, make_target, prompts
from transformers import AutoModelForCausalLM, Qwen2Config

from eagle3_hf import Eagle3CandidateGenerator
from eagle3_hf.neuron.buckets import context_buckets, decode_threshold, pick
from eagle3_hf.neuron.families import check_family, take_apart
from eagle3_hf.neuron.rejection import REJECTED, draw, reject
from eagle3_hf.neuron.runtime import GraphRuntime

VARIANTS = {
    "plain": {},
    "unfused": {"fuse_draft_loop": False},
    "fused step": {"fuse_step": True},
    "memory buckets": {"kv_buckets": [16, 24]},
    "all": {"fuse_step": True, "kv_buckets": [16], "do_sample": True},
    "bucket of a round's width": {"context_buckets": [1 + DRAFTS, 16]},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_as_plain_up_to_the_last_slot(variant):
    target, draft = make_pair()
    model = in_process(target, draft, **VARIANTS[variant])
    accepted = 0
    for seed, (batch, width, new) in enumerate([(3, 12, LENGTH - 12), (1, 1, LENGTH - 1), (2, 16, 9), (3, 4, 1)]):
        stats = assert_same_as_plain(model, target, prompts(batch, width, seed), new, seed=seed)
        accepted += stats.accepted
    assert accepted > 20
    decoded = sum(count for name, count in model.runtime.calls.items() if name.startswith("target_decode"))
    assert decoded > 0, "no row came near enough to the end for one-token decoding"


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen2"])
def test_other_families(family):
    if family == "qwen2":  # biases on q, k, v; and tied embeddings, which are stored once
        base = config_of("llama").to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        config = Qwen2Config(
            **{name: base[name] for name in names}, num_key_value_heads=2, tie_word_embeddings=True,
            initializer_range=0.3, max_position_embeddings=96, pad_token_id=PAD, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for layer in target.model.layers:
                layer.self_attn.q_proj.bias.normal_()
        draft = make_draft(target)
        assert "target.lm_head.weight" not in take_apart(target, draft).stored
    else:
        target, draft = make_pair(family)
    model = in_process(target, draft)
    assert assert_same_as_plain(model, target, prompts(3, 9, 1), LENGTH - 9).accepted > 5


def test_the_eager_target_is_left_as_it_was():
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(config_of("llama")).eval()
    kind = type(target)
    take_apart(target, make_draft(target))
    assert type(target) is kind


DRAFT_KINDS = {
    "plain": {},
    "attention and mlp biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "query and key norms": {"qk_norm": True},
    "residual after the norm": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "norm of each state": {"fc_norm": True},
    "state after the norm": {"norm_output": True},
    "no final norm": {"final_norm": False},
    "two layers": {"num_hidden_layers": 2},
    "another width": {"own_embeddings": True, "hidden_size": 24, "target_hidden_size": 32, "head_dim": 8},
    "full vocabulary": {"draft_vocab_size": 16},
    "scaled positions": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                             "original_max_position_embeddings": 32}},
}  # fmt: skip


def _shake(draft):
    """Norms and biases start as ones and zeros, which would hide that one was forgotten."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.5)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", DRAFT_KINDS)
def test_drafts_are_those_of_the_eager_draft(kind, fused):
    target = make_target("llama")
    draft = make_draft(target, **DRAFT_KINDS[kind])
    _shake(draft)
    inputs = prompts(1, 7, 5)
    eager, static = [], []
    original, propose = Eagle3CandidateGenerator.propose, GraphRuntime.propose

    def record_eager(self, roots, depth):
        tree = original(self, roots, depth)
        eager.append(tree.tokens[0, 1:].tolist())
        return tree

    def record_static(self, *args, **kwargs):
        drafts = propose(self, *args, **kwargs)
        static.append(drafts[0].tolist())
        return drafts

    with mock.patch.object(Eagle3CandidateGenerator, "propose", record_eager):
        options = {"assistant_model": draft, "num_assistant_tokens": DRAFTS, "do_sample": False, "max_new_tokens": 20}
        target.generate(**inputs, **options)
    model = in_process(target, draft, batch=2, fuse_draft_loop=fused)
    with mock.patch.object(GraphRuntime, "propose", record_static):
        model.generate(**inputs, max_new_tokens=20)
    assert len(eager) > 5
    # The eager loop drafts less where fewer tokens are left.
    assert [b[: len(a)] for a, b in zip(eager, static)] == eager
    assert len({tuple(drafts) for drafts in eager}) > 3, "drafts that are all alike prove little"


def test_a_row_not_in_use_keeps_its_memory():
    target, draft = make_pair()
    model = in_process(target, draft, batch=2)
    model.generate(**prompts(2, 6, 1, ragged=False), max_new_tokens=8)
    before = {name: tensor.clone() for name, tensor in model.runtime.memory.items()}
    model.generate(**prompts(1, 5, 2), max_new_tokens=12)
    for name, tensor in model.runtime.memory.items():
        assert torch.equal(tensor[1, :, :-1], before[name][1, :, :-1]), name
        assert not torch.equal(tensor[0], before[name][0])


def _reject_by_hand(drafts, chosen, allowed):
    out = []
    for i, token in enumerate(chosen):
        out.append(token)
        if i == len(drafts) or drafts[i] != token or not allowed[i]:
            break
    return out + [REJECTED] * (len(chosen) - len(out)), len(out)


def test_rejection_against_a_loop():
    chance = random.Random(0)
    drafts = [[chance.randrange(2) for _ in range(4)] for _ in range(300)]
    chosen = [[chance.randrange(2) for _ in range(5)] for _ in range(300)]
    allowed = [[chance.random() < 0.9 for _ in range(4)] for _ in range(300)]
    out, count = reject(
        torch.tensor(drafts, dtype=torch.int32), torch.tensor(chosen, dtype=torch.int32), torch.tensor(allowed)
    )
    assert (out.dtype, count.dtype) == (torch.int32, torch.int32)
    wanted = [_reject_by_hand(*row) for row in zip(drafts, chosen, allowed)]
    assert list(zip(out.tolist(), count.tolist())) == wanted
    assert {n for _, n in wanted} == {1, 2, 3, 4, 5}


def test_choice_follows_the_distribution_exactly():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0]).log_softmax(0)
    heat, steps = 0.7, 4000
    uniforms = ((torch.arange(steps) + 0.5) / steps)[None]
    greedy = torch.zeros(2, steps, dtype=torch.int32)
    drawn = draw(logits.expand(2, steps, -1), greedy, torch.tensor([heat, 0.0]), uniforms.expand(2, -1))
    share = torch.bincount(drawn[0].long(), minlength=4) / steps
    assert torch.allclose(share, (logits / heat).softmax(0), atol=1e-3)
    assert set(drawn[1].tolist()) == {0}, "temperature 0 is greedy"
    edge = draw(logits.expand(1, 2, -1), greedy[:1, :2], torch.tensor([heat]), torch.tensor([[0.0, 1.0]]))
    assert edge.tolist() == [[0, 3]], "even a uniform of 1 stays inside the vocabulary"


def test_sampled_text_has_the_targets_distribution():
    target, draft = make_pair()
    rows = 256
    model = in_process(target, draft, batch=rows, do_sample=True, sequence_length=16, context_buckets=[8])
    inputs = prompts(1, 5, 3)
    ids = inputs["input_ids"].expand(rows, -1)
    torch.manual_seed(0)
    samples = torch.cat(
        [model.generate(ids, max_new_tokens=3, do_sample=True, temperature=0.8, top_k=0)[:, 5:] for _ in range(8)]
    )
    assert model.speculation_stats.accepted > 0, "nothing was accepted, so acceptance wasn't tested"
    with torch.no_grad():
        first = (target(inputs["input_ids"]).logits[0, -1] / 0.8).softmax(-1)
        pairs = torch.cat((inputs["input_ids"].expand(16, -1), torch.arange(16)[:, None]), dim=1)
        second = first @ (target(pairs).logits[:, -1] / 0.8).softmax(-1)
    for place, wanted in ((0, first), (1, second)):
        counts = torch.bincount(samples[:, place], minlength=16).double()
        expected = wanted.double() * len(samples)
        large = expected >= 5
        found = torch.cat((counts[large], counts[~large].sum()[None]))
        ideal = torch.cat((expected[large], expected[~large].sum()[None]))
        kept = ideal > 0.5
        assert chisquare(found[kept], ideal[kept] * found[kept].sum() / ideal[kept].sum()).pvalue > 1e-3
    greedy = target.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist() == greedy.tolist()


def test_buckets():
    assert context_buckets(256) == [64, 128, 256]
    assert context_buckets(200) == [64, 128, 200]
    assert context_buckets(40) == [40]
    assert [pick(n, [8, 16], "prompt length") for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    with pytest.raises(ValueError, match="prompt length 17 is above the largest compiled bucket, 16"):
        pick(17, [8, 16], "prompt length")
    assert decode_threshold(4) == 5


def test_graph_names_and_shapes():
    target, draft = make_pair()
    model = in_process(target, draft)
    expected = {f"{kind}_{size}" for kind in ("target_prefill", "draft_propose") for size in BUCKETS}
    assert set(model.graphs) == expected | {"target_verify", "target_decode", "draft_propose_round"}
    entry = model.graphs["draft_propose_round"]
    assert {spec.name: spec.shape for spec in entry.inputs} == {
        "tokens": (3, decode_threshold(DRAFTS)), "features": (3, 1 + DRAFTS, 96), "positions": (3,), "counts": (3,)
    }  # fmt: skip
    for entry in model.graphs.values():
        kinds = {spec.dtype for spec in entry.inputs if spec.name not in ("features", "state")}
        assert kinds == {"int32"}, "every id, position and count is int32"
        assert entry.aliases == {i: len(entry.outputs) + i for i in range(len(entry.memory))}


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mixtral"])
def test_other_decoders_are_refused_by_name(family):
    config = config_of(family)
    with pytest.raises(ValueError, match=f"'{config.model_type}' can't be exported.*llama, mistral, qwen2, qwen3"):
        check_family(config)


def test_what_a_llama_may_not_have():
    with pytest.raises(ValueError, match="sliding-window layers"):
        check_family(config_of("mistral"))
    target = make_target("llama")
    target.model.rotary_emb.rope_type = "dynamic"
    with pytest.raises(ValueError, match="target's RoPE of type 'dynamic'"):
        take_apart(target, make_draft(target))
    with pytest.raises(ValueError, match="sequence_length 97 is above the target's 96 positions"):
        in_process(*make_pair(), sequence_length=97)


def test_config_errors():
    pair = make_pair()
    for options, message in (
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"tensor_parallel_size": 2, "backend": "xla"}, "backend 'xla' writes graphs for one core"),
        ({"sequence_length": 5}, "sequence_length 5 is too short for num_speculative_tokens 3"),
        ({"context_buckets": [8, 64]}, r"context_buckets \[8, 64\] must lie in 1..40"),
        ({"kv_buckets": [2]}, "smallest of kv_buckets, 2"),
        ({"fuse_step": True, "fuse_draft_loop": False}, "fuse_step needs fuse_draft_loop"),
        ({"torch_dtype": "int8"}, "torch_dtype must be one of"),
        ({"instance_type": "inf2"}, "instance_type is for backend 'neuron'"),
        ({"backend": "tpu"}, "backend must be one of"),
        ({"torch_dtype": "bf16"}, "loaded in torch.float32, the export is for torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            in_process(*pair, **options)
