"""Models split over ranks and padded to another width: the same tokens, and the same numbers up to rounding."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from neuron_support import (
    ALLOWED,
    LENGTH,
    AllRanksBackend,
    StackedGroup,
    assert_same_as_plain,
    in_process,
    make_pair,
    short_names,
    stacked,
)
from safetensors import safe_open
from support import make_draft, make_target, prompts

from eagle3_hf.neuron import Eagle3NeuronConfig, Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.families import take_apart
from eagle3_hf.neuron.layers import linear
from eagle3_hf.neuron.parallel import ALONE, embed, likeliest
from eagle3_hf.neuron.specs import GraphTable
from eagle3_hf.neuron.split import fit, rank_weights

SOURCE = Path(__file__).resolve().parents[1] / "src"

# Vocabularies that can't be split evenly, and more ranks than key/value heads (which are 2).
VARIANTS = {
    "two ranks": {"tensor_parallel_size": 2},
    "four ranks": {"tensor_parallel_size": 4},
    "four ranks, one graph a round": {"tensor_parallel_size": 4, "fuse_step": True, "kv_buckets": [16]},
    "two ranks, unfused": {"tensor_parallel_size": 2, "fuse_draft_loop": False},
    "two ranks, sampling compiled in": {"tensor_parallel_size": 2, "do_sample": True},
    "padded": {"padded_hidden_size": 48},
    "padded, four ranks": {"padded_hidden_size": 48, "tensor_parallel_size": 4},
}
DRAFTS = {
    "plain": {},
    "biases": {"attention_bias": True, "mlp_bias": True, "fc_bias": True},
    "norms": {"norm_before_fc": True, "norm_before_residual": True, "qk_norm": True},
    "norm of each state": {"fc_norm": True, "norm_output": True},
    "another width": {"own_embeddings": True, "hidden_size": 24, "target_hidden_size": 32, "head_dim": 8},
    "own embeddings": {"own_embeddings": True},
}


def shake(model):
    """Norms and biases start as ones and zeros, which would hide that one was lost."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return model


def odd_pair(num_hidden_layers=4, **draft_changes):
    """A pair with vocabularies of 19 and 13 tokens."""
    target = shake(make_target("llama", vocab_size=19, attention_bias=True, num_hidden_layers=num_hidden_layers))
    aux = {"aux_hidden_state_layers": [1, 0, num_hidden_layers]}
    return target, shake(make_draft(target, draft_vocab_size=13, **(aux | draft_changes)))


def backend_for(options):
    return AllRanksBackend() if options.get("tensor_parallel_size", 1) > 1 else None


@pytest.mark.parametrize("variant", VARIANTS)
def test_same_tokens_as_plain(variant):
    options = VARIANTS[variant]
    target, draft = odd_pair()
    model = in_process(target, draft, runner=backend_for(options), **options)
    accepted = 0
    for seed, (batch, width, new) in enumerate([(3, 9, LENGTH - 9), (2, 14, 10)]):
        accepted += assert_same_as_plain(model, target, prompts(batch, width, seed), new, seed=seed).accepted
    assert accepted > 10


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_families(family):
    target, draft = make_pair(family)
    model = in_process(shake(target), draft, runner=AllRanksBackend(), tensor_parallel_size=2, padded_hidden_size=40)
    assert assert_same_as_plain(model, target, prompts(3, 9, 1), LENGTH - 9).accepted > 5


def whole_and_split(target, draft, **options):
    """The same config without and with `options`: the models, the graphs, and the group of the second."""
    values = {"batch_size": 2, "sequence_length": 24, "context_buckets": [8], "fuse_draft_loop": False}
    made = []
    for extra in ({}, options):
        config = Eagle3NeuronConfig(**values, **extra)
        group = StackedGroup(config.tensor_parallel_size)
        models = fit(take_apart(target, draft), config, group if group.world > 1 else ALONE)
        made.append((models, {graph.name: graph for graph in GraphTable(models, config).all()}, group))
    return made


def run(side, name, inputs):
    """One graph on fresh memory: outputs and memory of all ranks, the rank as a first axis."""
    models, graphs, group = side
    graph = graphs[name]

    def work(weights):
        memory = [spec.zeros() for spec in graph.memory]
        return graph.function([weights[place] for place in graph.weights], inputs, memory)

    return group.run(work, stacked([rank_weights(models, rank, group.world) for rank in range(group.world)]))


def assert_near(made, wanted):
    """To 1e-5 of the largest number: sums over ranks are rounded in another order, and states cancel."""
    torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5 * float(wanted.abs().max().clamp(min=1)))


def widened(features, states, width):
    """Features as the padded target would give them."""
    parts = [torch.nn.functional.pad(part, (0, width - part.shape[-1])) for part in features.chunk(states, dim=-1)]
    return torch.cat(parts, dim=-1)


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize(
    "options", [{"tensor_parallel_size": 4}, {"padded_hidden_size": 48, "tensor_parallel_size": 2}]
)
def test_states_and_drafts_are_those_of_the_whole(kind, options):
    target, draft = odd_pair(**DRAFTS[kind])
    if kind == "another width" and options["tensor_parallel_size"] == 4:
        options = options | {"tensor_parallel_size": 2}
    whole, split = whole_and_split(target, draft, **options)
    states, real = 3, target.config.hidden_size
    width = options.get("padded_hidden_size", real)
    ids = torch.randint(0, 19, (2, 8), dtype=torch.int32)
    lengths = torch.tensor([8, 5], dtype=torch.int32)
    (wanted, aux), memory = run(whole, "target_prefill_8", [ids, lengths])
    (tokens, made), new = run(split, "target_prefill_8", [ids, lengths])
    assert torch.equal(tokens, wanted.expand_as(tokens))
    expected = widened(aux, states, width)
    assert_near(made, expected.expand_as(made))
    if options["tensor_parallel_size"] == 2:  # each rank holds heads of its own
        for one, other in zip(new, memory):
            assert_near(torch.cat(one.unbind(), dim=1), other[0])
    features = torch.randn(2, 8, states * real)
    start = torch.zeros(2, dtype=torch.int32)
    assert_same_draft(whole, split, [ids, features, start, lengths], width)


def assert_same_draft(whole, split, inputs, width):
    """The draft's context pass and a recurrent step after it: the same tokens and states."""
    tokens, features, start, counts = inputs
    (draft, state), _ = run(whole, "draft_prefill_8", inputs)
    wide = widened(features, features.shape[-1] // whole[0].target_shape.hidden_size, width)
    (made, states), _ = run(split, "draft_prefill_8", [tokens, wide, start, counts])
    own = split[0].draft_shape.hidden_size
    assert torch.equal(made, draft.expand_as(made))
    assert_near(states, widened(state, 1, own).expand_as(states))
    (draft, state), _ = run(whole, "draft_recurrent", [draft[0], state[0], counts])
    (made, states), _ = run(split, "draft_recurrent", [made[0], states[0], counts])
    assert torch.equal(made, draft.expand_as(made))
    assert_near(states, widened(state, 1, own).expand_as(states))


def logits_of(side, name, state, who="target"):
    """Logits of states through a head that may be split."""
    models, _, group = side
    names, shape = (
        (models.target_names, models.target_shape) if who == "target" else (models.draft_names, models.draft_shape)
    )

    def work(stored):
        weights = {own: stored[place] for own, place in names.items()}
        return shape.group.gather(linear(state, weights, name))[..., : shape.vocab_size]

    return group.run(work, stacked([rank_weights(models, rank, group.world) for rank in range(group.world)]))


@pytest.mark.parametrize("world", [2, 4])
def test_logits_are_those_of_the_whole(world):
    target, draft = odd_pair()
    whole, split = whole_and_split(target, draft, tensor_parallel_size=world, padded_hidden_size=48)
    state = torch.randn(2, 5, 32)
    wide = torch.nn.functional.pad(state, (0, 16))
    for who in ("target", "draft"):
        wanted, made = logits_of(whole, "lm_head", state, who), logits_of(split, "lm_head", wide, who)
        assert made.shape == (world, *wanted.shape[1:])
        torch.testing.assert_close(made, wanted.expand_as(made), rtol=1e-5, atol=1e-5)


def test_gpt_oss_width_at_real_size():
    """2880 lanes padded to 3072, 64 heads, 8 key/value heads, two ranks: one layer of each model."""
    sizes = {
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "initializer_range": 0.02, "vocab_size": 61,
    }  # fmt: skip
    target = make_target("llama", num_hidden_layers=1, **sizes)
    draft = make_draft(target, **sizes, draft_vocab_size=37, aux_hidden_state_layers=[0, 1], num_aux_hidden_states=2)
    shake(target), shake(draft)
    whole, split = whole_and_split(target, draft, tensor_parallel_size=2, padded_hidden_size=3072)
    assert split[1]["target_prefill_8"].outputs[1].shape == (2, 8, 2 * 3072)
    ids = torch.randint(0, 61, (2, 8), dtype=torch.int32)
    lengths = torch.tensor([8, 3], dtype=torch.int32)
    (wanted, features), _ = run(whole, "target_prefill_8", [ids, lengths])
    (tokens, made), _ = run(split, "target_prefill_8", [ids, lengths])
    assert torch.equal(tokens, wanted.expand_as(tokens))
    wide, start = widened(features[0], 2, 3072), torch.zeros(2, dtype=torch.int32)
    assert_near(made, wide.expand_as(made))
    assert_same_draft(whole, split, [ids, features[0], start, lengths], 3072)


@pytest.mark.parametrize(("size", "world"), [(19, 2), (19, 4), (5, 4), (16, 4)])
def test_tables_split_by_tokens(size, world):
    group, rows = StackedGroup(world), -(-size // world)
    table = torch.nn.functional.pad(torch.randn(size, 6), (0, 0, 0, rows * world - size))
    ids = torch.randint(0, size, (3, 4), dtype=torch.int32)
    # Integers, for ties; all negative, so that the zeros of padded columns would win.
    logits = torch.randint(-9, -1, (3, 4, size)).float()
    padded = torch.nn.functional.pad(logits, (0, rows * world - size))

    def work(rank, rows, columns):
        return embed(ids, rows, rank, group), likeliest(columns, size, rank, group)

    ranks = torch.arange(world, dtype=torch.int32)[:, None]
    found, tokens = group.run(work, ranks, table.view(world, rows, 6), torch.stack(padded.chunk(world, dim=-1)))
    assert torch.equal(found, table[ids.long()].expand_as(found))
    assert torch.equal(tokens, logits.argmax(-1).to(torch.int32).expand_as(tokens))


def test_what_can_not_be_split():
    target, draft = make_pair()
    for options, message in (
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 doesn't suit the target: num_attention_heads 4"),
        ({"padded_hidden_size": 16}, "padded_hidden_size 16 is below the target's hidden_size 32"),
    ):
        with pytest.raises(ValueError, match=message):
            in_process(target, draft, runner=AllRanksBackend(), **options)
    draft = make_draft(target, intermediate_size=49)
    with pytest.raises(ValueError, match="doesn't suit the draft: intermediate_size 49"):
        in_process(target, draft, runner=AllRanksBackend(), tensor_parallel_size=2)


_RANK = """
import json, sys
import torch
from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = Eagle3NeuronModelForCausalLM.from_pretrained(sys.argv[1])
job = json.loads(sys.argv[2])
ids, mask = torch.tensor(job["input_ids"]), torch.tensor(job["attention_mask"])
greedy = model.generate(ids, mask, max_new_tokens=20)
torch.manual_seed(rank)  # ranks that draw for themselves would go apart
sampled = model.generate(ids, mask, max_new_tokens=20, do_sample=True, top_k=0)
weights = sum(tensor.numel() for tensor in model.runtime.memory.values())
json.dump([greedy.tolist(), sampled.tolist(), weights], open(f"{sys.argv[3]}{rank}", "w"))
torch.distributed.destroy_process_group()
"""


def test_two_processes(tmp_path):
    """The exported folder, read by two processes that gloo joins."""
    target, draft = odd_pair(num_hidden_layers=2)
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(
        target, draft, batch_size=2, sequence_length=32, context_buckets=[8], num_speculative_tokens=2, do_sample=True,
        tensor_parallel_size=2, padded_hidden_size=40,
    )  # fmt: skip
    made = Eagle3NeuronModelForCausalLM.export(target, draft, config, output=tmp_path / "out")
    assert made.graphs["target_verify"].operators["eagle3_hf.sum_ranks.default"] == 1 + 2 * 2
    used = short_names(name for graph in made.graphs.values() for name in graph.operators)
    # Random numbers add softmax and division; ranks a range check and the collectives.
    extra = {"__and__", "ge", "sum_ranks", "gather_ranks", "softmax", "div", "zeros_like"}
    assert used <= ALLOWED | extra
    names = sorted(path.name for path in (tmp_path / "out" / "weights").iterdir())
    assert names == ["tp0_sharded_checkpoint.safetensors", "tp1_sharded_checkpoint.safetensors"]
    for rank, name in enumerate(names):
        with safe_open(tmp_path / "out" / "weights" / name, "pt") as file:
            assert file.get_tensor("rank").tolist() == [rank]
            assert file.get_slice("target.model.layers.0.self_attn.q_proj.weight").get_shape() == [16, 40]
            assert file.get_slice("target.lm_head.weight").get_shape() == [10, 40]
    with pytest.raises(RuntimeError, match=r"compiled for 2 cores.*torchrun --nproc-per-node 2"):
        Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")
    inputs = prompts(2, 8, 4)
    job = json.dumps({name: tensor.tolist() for name, tensor in inputs.items()})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "PYTHONPATH": str(SOURCE), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", _RANK, "out", job, "answer"]
    running = [
        subprocess.Popen(command, cwd=tmp_path, env={**shared, "WORLD_SIZE": "2", "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [each.wait(300) for each in running] == [0, 0]
    first, second = (json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first[0] == target.generate(**inputs, do_sample=False, max_new_tokens=20).tolist()
    assert first[1] != first[0]
    assert first[2] == (2 + 1) * 2 * 2 * 1 * 32 * 8, "each rank holds one of the two key/value heads"
