"""The backend `xla`: HLO protos through torch_xla. Needs an environment with torch 2.9.1 and torch_xla 2.9.0.

torch_xla's own counters are the evidence: programs compiled, and operators handed back to PyTorch.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from neuron_support import assert_same_as_plain, in_process
from support import make_draft, make_target, prompts

pytest.importorskip("torch_xla", reason="torch_xla isn't installed here: see docs/neuron.md for its environment")

from eagle3_hf.neuron import Eagle3NeuronConfig, Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.backends import xla
from eagle3_hf.neuron.backends.xla import compiles, fallbacks
from eagle3_hf.neuron.families import take_apart
from eagle3_hf.neuron.specs import GraphTable

pytestmark = pytest.mark.xla

SOURCE = Path(__file__).resolve().parents[1] / "src"
SIZES = {"batch_size": 2, "sequence_length": 32, "context_buckets": [8], "num_speculative_tokens": 2}
# Batch sizes of their own: XLA compiles a graph that it has seen before in this process no second time.
VARIANTS = {
    "plain": {"context_buckets": [8, 16]},
    "unfused": {"batch_size": 3, "fuse_draft_loop": False},
    "all": {"batch_size": 4, "fuse_step": True, "kv_buckets": [16], "do_sample": True},
}


@pytest.fixture(scope="module")
def pair():
    target = make_target("llama", num_hidden_layers=2)
    return target, make_draft(target, aux_hidden_state_layers=[2, 0, 1])


def export(pair, folder, **options):
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(*pair, backend="xla", **(SIZES | options))
    return Eagle3NeuronModelForCausalLM.export(*pair, config, output=folder)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_compile_a_graph_and_none_in_serving(variant, pair, tmp_path):
    options = VARIANTS[variant]
    start = compiles()
    model = export(pair, tmp_path / "out", **options)
    assert compiles() == start, "an export only writes"
    assert {entry.file.rpartition(".")[2] for entry in model.graphs.values()} == {"hlo"}
    model.load()
    warm = compiles()
    assert warm - start == len(model.graphs), "one compile for each graph"
    accepted = 0
    longer = 14 if "context_buckets" in options else 3
    for seed, (batch, width, new) in enumerate([(2, 8, 24), (1, longer, 32 - longer), (2, 7, 3)]):
        accepted += assert_same_as_plain(model, pair[0], prompts(batch, width, seed), new, seed=seed).accepted
    assert accepted > 10
    assert compiles() == warm, "nothing is compiled in serving"
    assert fallbacks() == {}, "nothing goes back to PyTorch"
    # One token a call comes near the end only, where the larger memory bucket is needed.
    assert {name for name, calls in model.runtime.calls.items() if not calls} <= {"target_decode_kv16"}
    if options.get("do_sample"):
        _same_draws(model, pair, options)
    sys.stdout.write(
        f"\n{variant}: {len(model.graphs)} graphs, CompileTime {warm - start} in warm-up, {compiles() - warm} in "
        f"serving, aten:: {fallbacks()}, calls {model.runtime.calls}\n"
    )


def _same_draws(model, pair, options):
    """The same random numbers give the same tokens as the graphs uncompiled."""
    values = SIZES | options
    eager = in_process(*pair, batch=values.pop("batch_size"), **values)
    answers = []
    for each in (model, eager):
        torch.manual_seed(5)
        answers.append(each.generate(**prompts(2, 8, 1), max_new_tokens=16, do_sample=True, temperature=0.9, top_k=0))
    assert answers[0].tolist() == answers[1].tolist()


_FRESH = """
import json, sys
import torch
from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.backends.xla import compiles, fallbacks

model = Eagle3NeuronModelForCausalLM.from_pretrained(sys.argv[1])
warm, job = compiles(), json.loads(sys.argv[2])
out = model.generate(torch.tensor(job["input_ids"]), torch.tensor(job["attention_mask"]), max_new_tokens=20)
json.dump([out.tolist(), len(model.graphs), warm, compiles(), fallbacks()], sys.stdout)
"""


def test_in_a_fresh_process(pair, tmp_path):
    model = export(pair, tmp_path / "out")
    for name, entry in model.graphs.items():
        size = (tmp_path / "out" / entry.file).stat().st_size
        assert size < 200_000, f"{name} holds weights"
        assert {"parameter", "dot"} <= set(entry.operators)
        assert not {"custom-call", "while", "sort", "rng", "rng-bit-generator"} & set(entry.operators), name
    inputs = prompts(2, 8, 4)
    job = json.dumps({name: tensor.tolist() for name, tensor in inputs.items()})
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", _FRESH, "out", job]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    out, graphs, warm, after, handed = json.loads(made.stdout)
    assert out == pair[0].generate(**inputs, do_sample=False, max_new_tokens=20).tolist()
    assert graphs == warm == after and handed == {}


def test_a_compile_in_serving_is_an_error():
    backend = xla.XlaBackend()
    x = backend.place(torch.arange(7))
    with pytest.raises(RuntimeError, match="compiled anew after warm-up"), backend.no_compiling():
        backend.fetch(x * 3 + 2)


def test_what_an_hlo_may_not_have(pair, tmp_path):
    config = Eagle3NeuronConfig(**SIZES, backend="xla")
    models = take_apart(*pair)
    graph, backend, table = GraphTable(models, config).verify(2, 32), xla.XlaBackend(), torch.randn(1, 3)

    def changed(how):
        def function(weights, inputs, memory):
            outputs, new = graph.function(weights, inputs, memory)
            return [how(outputs[0]), *outputs[1:]], new

        return replace(graph, function=function)

    with pytest.raises(RuntimeError, match=r"isn't weight-free: a tensor \[1, 3\] is baked in"):
        backend.compile(changed(lambda x: x + table.to(x.device)), models.stored, tmp_path / "baked")
    with pytest.raises(RuntimeError, match="without an XLA lowering"):
        backend.compile(changed(lambda x: x.cumprod(-1)), models.stored, tmp_path / "fallback")
