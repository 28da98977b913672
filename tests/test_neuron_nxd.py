"""The parts of the backend `neuron` that need no AWS package, and how it calls NxD, held against optimum-neuron 0.4.5.

Nothing here stands in for torch_neuronx or neuronx_distributed. What needs them is marked `neuron`, never run so far.
"""

import ast
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

import pytest
import torch
from neuron_support import AllRanksBackend, make_pair
from support import make_draft, make_target

from eagle3_hf.neuron import Eagle3NeuronConfig, Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.backends import neuron
from eagle3_hf.neuron.families import take_apart
from eagle3_hf.neuron.parallel import ALONE
from eagle3_hf.neuron.specs import GraphTable
from eagle3_hf.neuron.split import fit, rank_weights


def graphs_of(**options):
    target = make_target("llama", num_hidden_layers=2)
    draft = make_draft(target, aux_hidden_state_layers=[2, 0, 1])
    values = {"batch_size": 2, "sequence_length": 24, "context_buckets": [8, 16], "num_speculative_tokens": 3}
    config = Eagle3NeuronConfig(**(values | options))
    world = config.tensor_parallel_size
    models = fit(take_apart(target, draft), config, AllRanksBackend().group(world) if world > 1 else ALONE)
    return GraphTable(models, config).all(), rank_weights(models, 0, world)


# 16 is twice 8, and a bucket as wide as a round makes prompt and round graphs alike.
SETS = [{}, {"kv_buckets": [16], "context_buckets": [4, 8]}, {"fuse_step": True}, {"fuse_draft_loop": False}]


@pytest.mark.parametrize("options", SETS)
def test_every_graph_has_inputs_of_its_own_shapes(options):
    graphs, _ = graphs_of(**options)
    taken = neuron.routes(graph.name for graph in graphs)
    shapes = {str([list(t.shape) for t in neuron.example_inputs(graph, taken[graph.name])]) for graph in graphs}
    assert len(shapes) == len(graphs), "NxD's router would take one graph for another"
    backwards = neuron.routes(graph.name for graph in reversed(graphs))
    assert {name: len(route) for name, route in backwards.items()} == {n: len(r) for n, r in taken.items()}


def test_the_first_graph_has_all_memory():
    graphs, _ = graphs_of()
    first, *others = neuron.whole_memory(graphs)
    assert {spec.name for graph in graphs for spec in graph.memory} == {spec.name for spec in first.memory}
    assert others == graphs[1:]
    assert first.aliases == {i: len(first.outputs) + i for i in range(len(first.memory))}


@pytest.mark.parametrize("options", [{}, {"fuse_step": True, "do_sample": True}])
def test_a_module_computes_its_graph(options):
    torch.manual_seed(0)
    graphs, stored = graphs_of(**options)
    outputs = max(len(graph.outputs) for graph in graphs)
    for graph in neuron.whole_memory(graphs):
        module = neuron.GraphModule(graph, stored, outputs)
        assert not any("." in name for name, _ in module.named_parameters())
        assert not any(tensor.is_floating_point() and tensor.any() for tensor in module.parameters()), (
            "weights baked in"
        )
        # As NxD loads them: by the names of parameters.
        weights = {neuron.parameter_name(name): stored[name] for name in graph.weights}
        memory = [torch.randn(spec.shape) for spec in graph.memory]
        module.load_state_dict(weights | dict(zip([neuron.parameter_name(s.name) for s in graph.memory], memory)))
        inputs = [torch.ones_like(spec.zeros()) for spec in graph.inputs]
        made = module(*inputs, neuron.routes(["a", "b"])["b"])
        wanted, new = graph.function([stored[name] for name in graph.weights], inputs, memory)
        assert len(made) == outputs + len(memory), "all graphs must return equally many"
        for one, other in zip(made, wanted):
            assert torch.equal(one, other) and one.dtype == other.dtype
        aliases = module.aliases()
        assert [name for name, tensor in module.named_parameters() if tensor in aliases] == [
            neuron.parameter_name(spec.name) for spec in graph.memory
        ]
        for parameter, place in aliases.items():
            name = next(name for name, tensor in module.named_parameters() if tensor is parameter)
            at = [neuron.parameter_name(spec.name) for spec in graph.memory].index(name)
            assert torch.equal(made[place], new[at])


def test_compiler_arguments():
    assert neuron.compiler_arguments(None) == "--auto-cast=none --model-type=transformer -O1 --lnc=1"
    assert neuron.compiler_arguments("trn2").endswith("--lnc=2 --target trn2")


def test_its_collectives_are_asked_for_only_when_split():
    backend = neuron.NeuronBackend()
    assert backend.group(1) is ALONE
    assert backend.group(4).world == 4
    assert backend.ranks(4) == [0, 1, 2, 3]


def _calls(tree, name):
    """Keywords of every call of `name`, a function or a method."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [node for node in found if getattr(node.func, "attr", getattr(node.func, "id", None)) == name]
    return [{keyword.arg for keyword in node.keywords} for node in named]


@pytest.fixture(scope="module")
def pinned():
    """optimum-neuron's way of using NxD; its sources can be read where they can't be imported."""
    if importlib.util.find_spec("optimum.neuron") is None:
        pytest.skip("optimum-neuron isn't installed here")
    version = importlib.metadata.version("optimum-neuron")
    if version != "0.4.5":
        pytest.skip(f"optimum-neuron is {version} here, the backend is written against 0.4.5")
    root = Path(importlib.util.find_spec("optimum.neuron").submodule_search_locations[0]) / "models/inference/backend"
    names = ("pretrained_model", "modules/decoder/decoder_builders", "modules/decoder/modeling_decoder")
    return {name.rpartition("/")[2]: (root / f"{name}.py").read_text() for name in names}


def test_calls_of_nxd_are_those_of_optimum_neuron(pinned):
    ours, theirs = ast.parse(inspect.getsource(neuron)), ast.parse(pinned["pretrained_model"])
    for name in ("ModelBuilder", "add", "trace"):
        (mine,), known = _calls(ours, name), [keywords for keywords in _calls(theirs, name) if keywords]
        assert mine and any(mine <= keywords for keywords in known), (name, mine, known)
    assert "from neuronx_distributed.trace.model_builder import ModelBuilder" in pinned["pretrained_model"]
    assert "nxd_model.initialize(weights, start_rank_tensor)" in pinned["pretrained_model"]
    assert "class DecoderModelInstanceForCausalLM(BaseModelInstance)" in pinned["decoder_builders"]
    assert "return self.module, self.input_output_aliases" in pinned["decoder_builders"]
    assert 'f"tp{rank}_sharded_checkpoint.safetensors"' in pinned["pretrained_model"]
    for option in ("--auto-cast=none", "--model-type=transformer", "--lnc=", "--target"):
        assert option in pinned["modeling_decoder"] and option in neuron.compiler_arguments("trn2")


@pytest.mark.neuron
@pytest.mark.parametrize("options", [{}, {"fuse_step": True}, {"tensor_parallel_size": 2}])
def test_on_a_neuron_device(options, tmp_path):
    """Never run so far: needs torch_neuronx, neuronx_distributed, neuronx-cc and a device with two cores."""
    from eagle3_hf.neuron.validation import compare

    target, draft = make_pair()
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(
        target, draft, batch_size=2, sequence_length=32, context_buckets=[8, 16], backend="neuron", **options
    )
    Eagle3NeuronModelForCausalLM.export(target, draft, config, output=tmp_path / "out")
    assert compare(Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out"), target) == 32
