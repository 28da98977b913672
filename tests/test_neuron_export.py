"""The exported folder: what is in it, loading it in another process, and everything that may be wrong with it."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from neuron_support import ALLOWED, assert_same_as_plain, make_shallow_pair, short_names
from support import prompts

from eagle3_hf.neuron import Eagle3NeuronConfig, Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.artefact import read_manifest, sha256
from eagle3_hf.neuron.backends.torch_export import trace
from eagle3_hf.neuron.families import take_apart
from eagle3_hf.neuron.specs import GraphTable

SOURCE = Path(__file__).resolve().parents[1] / "src"
BATCH, LENGTH, DRAFTS = 2, 32, 2


@pytest.fixture(scope="module")
def pair():
    return make_shallow_pair()


@pytest.fixture(scope="module")
def exported(pair, tmp_path_factory):
    """A folder that no test may change."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(
        *pair, batch_size=BATCH, sequence_length=LENGTH, context_buckets=[8], num_speculative_tokens=DRAFTS
    )
    Eagle3NeuronModelForCausalLM.export(*pair, config, output=folder)
    return folder


@pytest.fixture(scope="module")
def model(exported):
    return Eagle3NeuronModelForCausalLM.from_pretrained(exported, num_cores=1, batch_size=BATCH)


@pytest.fixture
def copy(exported, tmp_path):
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def test_the_folder(exported):
    content = json.loads((exported / "manifest.json").read_text())
    files = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    hashed = set(content["files"]) | {graph["file"] for graph in content["graphs"].values()}
    assert files == hashed | {"manifest.json", "neuron_config.json"}
    assert {"config.json", "draft/config.json", "generation_config.json", "weights/target.safetensors"} <= files
    assert set(content["versions"]) == {"eagle3_hf", "torch", "transformers", "safetensors", "python"}
    verify = content["graphs"]["target_verify"]
    assert verify["sha256"] == sha256(exported / verify["file"])
    assert verify["inputs"] == [
        {"name": "ids", "shape": [BATCH, 1 + DRAFTS], "dtype": "int32"},
        {"name": "positions", "shape": [BATCH], "dtype": "int32"},
    ]
    assert [spec["name"] for spec in verify["outputs"]] == ["out", "count", "chosen", "aux"]
    assert verify["memory"][1] == {"name": "target.values.0", "shape": [BATCH, 2, LENGTH, 8], "dtype": "float32"}
    assert verify["aliases"] == {str(i): 4 + i for i in range(4)}
    assert content["graphs"]["draft_propose_8"]["weights"].count("target.model.embed_tokens.weight") == 1


def test_graph_files_hold_no_weights(exported):
    for path in (exported / "graphs").iterdir():
        with zipfile.ZipFile(path) as archive:
            data = [info for info in archive.infolist() if "/data/" in info.filename]
        # The smallest weight matrix there is has 16 * 32 float32 values.
        assert not [info.filename for info in data if info.file_size >= 2048], path


def test_only_operators_that_lower(exported):
    content = json.loads((exported / "manifest.json").read_text())
    short = short_names(name for graph in content["graphs"].values() for name in graph["operators"])
    assert short <= ALLOWED
    assert {"scatter", "argmax", "cumsum"} <= short


def test_lowers_to_stablehlo(pair, exported):
    """Run where torch-mlir is installed: what a compiler for devices takes, with nothing left to PyTorch."""
    fx = pytest.importorskip("torch_mlir.fx", reason="torch-mlir isn't installed here")
    graphs = GraphTable(take_apart(*pair), Eagle3NeuronConfig.from_pretrained(exported)).all()
    stored = take_apart(*pair).stored
    for graph in graphs:
        text = str(fx.export_and_import(trace(graph, stored), output_type="stablehlo"))
        dialects = set(re.findall(r"= \"?([a-z_]+)\.[a-z_]+", text))
        assert "stablehlo" in dialects and dialects <= {"stablehlo", "arith"}, graph.name
        assert not re.search(r"tensor<[^>]*\?", text) and "custom_call" not in text, graph.name


_FRESH = """
import json, sys
import torch
from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM
model = Eagle3NeuronModelForCausalLM.from_pretrained(sys.argv[1])
job = json.loads(sys.argv[2])
out = model.generate(torch.tensor(job["input_ids"]), torch.tensor(job["attention_mask"]), max_new_tokens=20)
json.dump(out.tolist(), sys.stdout)
"""


def test_in_a_fresh_process(exported, pair, tmp_path):
    inputs = prompts(BATCH, 8, 4)
    job = json.dumps({name: tensor.tolist() for name, tensor in inputs.items()})
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", _FRESH, str(exported), job]
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    plain = pair[0].generate(**inputs, do_sample=False, max_new_tokens=20)
    assert json.loads(made.stdout) == plain.tolist()


def test_compiled_programs_and_no_recompiling(exported, pair):
    graphs = []

    def count(module, example_inputs):
        graphs.append(module)
        return module

    torch.compiler.reset()
    model = Eagle3NeuronModelForCausalLM.from_pretrained(exported, torch_compile=count)
    assert len(graphs) == len(model.graphs) == 5
    for seed, (batch, new) in enumerate([(2, 24), (1, 24), (2, 3)]):
        assert_same_as_plain(model, pair[0], prompts(batch, 8, seed), new, seed=seed)
    assert len(graphs) == 5
    assert min(model.runtime.calls.values()) > 0, "a graph that never ran proves nothing"
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match="recompile"):
        model.generate(torch.tensor([[5]]), max_new_tokens=4)
    torch.compiler.reset()


def test_save_and_load(model, exported, pair, tmp_path):
    config = Eagle3NeuronConfig.from_pretrained(exported)
    assert config == Eagle3NeuronConfig.from_dict(config.to_dict())
    model.save_pretrained(tmp_path / "saved")
    again = Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.config.model_type == "llama"
    assert_same_as_plain(again, pair[0], prompts(2, 7, 1), 12)
    with pytest.raises(ValueError, match="isn't empty"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="isn't empty"):
        Eagle3NeuronModelForCausalLM.export(*pair, config, output=exported)


def test_export_true_and_half_precision(tmp_path):
    target, draft = make_shallow_pair()
    target.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    made = Eagle3NeuronModelForCausalLM.from_pretrained(
        tmp_path / "target", draft_model=tmp_path / "draft", export=True, batch_size=1, sequence_length=16,
        num_cores=1, auto_cast_type="bf16", num_speculative_tokens=1, warm_up=False,
    )  # fmt: skip
    assert made.neuron_config.torch_dtype == "bfloat16"
    assert {tensor.dtype for tensor in made.runtime.memory.values()} == {torch.bfloat16}
    out = made.generate(torch.tensor([[3, 4, 5]]))
    assert out.shape == (1, 16), "without a length, sequence_length is filled"
    with pytest.raises(ValueError, match="export=True needs draft_model"):
        Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "target", export=True)
    with pytest.raises(ValueError, match=r"no neuron_config.json.*pass export=True"):
        Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "target")


def test_weights_not_loaded(exported, pair):
    config = Eagle3NeuronConfig.from_pretrained(exported)
    model = Eagle3NeuronModelForCausalLM(exported, read_manifest(exported))
    assert model.neuron_config == config
    with pytest.raises(RuntimeError, match="weights aren't loaded"):
        model.generate(torch.tensor([[3]]))


def test_more_than_was_compiled(model):
    three = prompts(3, 4)
    for ids, options, message in (
        (torch.full((1, 9), 3), {}, "prompt length 9 is above the largest compiled bucket, 8"),
        (three["input_ids"], {}, "batch of 3 is above the compiled batch_size 2"),
        (torch.full((1, 8), 3), {"max_new_tokens": 25}, "max_new_tokens 25 are above the compiled sequence_length 32"),
        (torch.full((1, 8), 3), {"num_assistant_tokens": 3}, "compiled for num_speculative_tokens 2"),
        (torch.full((1, 8), 3), {"do_sample": True, "top_k": 0}, "export with do_sample=True"),
        (torch.full((1, 8), 3), {"repetition_penalty": 1.2}, "don't follow repetition_penalty"),
        (torch.full((1, 8), 3), {"max_length": 8}, "used up by the prompt"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "a prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **options)
    with pytest.raises(TypeError, match="num_asistant_tokens"):
        model.generate(torch.full((1, 8), 3), num_asistant_tokens=3)
    with pytest.raises(ValueError, match="padded on the left"):
        model.generate(torch.full((1, 3), 3), torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match=r"input ids must be int32 \[2, 3\], got int64 \[2, 3\]"):
        model.runtime.call("target_verify", [torch.ones(2, 3).long(), torch.ones(2).int()])


def _edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_another_k_than_compiled(copy):
    with pytest.raises(ValueError, match=r"tensor_parallel_size 1 -> 2.*fixed at export"):
        Eagle3NeuronModelForCausalLM.from_pretrained(copy, num_cores=2)
    with pytest.raises(ValueError, match=r"num_speculative_tokens 2 -> 3.*fixed at export"):
        Eagle3NeuronModelForCausalLM.from_pretrained(copy, num_speculative_tokens=3)
    _edit(copy / "neuron_config.json", lambda content: content.update(num_speculative_tokens=4))
    with pytest.raises(ValueError, match=r"neuron_config.json differs.*num_speculative_tokens 2 -> 4"):
        Eagle3NeuronModelForCausalLM.from_pretrained(copy)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "manifest cut short": (
        lambda d: (d / "manifest.json").write_text((d / "manifest.json").read_text()[:-20]), "manifest.json is damaged"
    ),
    "manifest edited": (
        lambda d: _edit(d / "manifest.json", lambda c: c["graphs"]["target_verify"]["aliases"].update({"0": 5})),
        "manifest.json is damaged: it isn't what the export wrote",
    ),
    "manifest of another kind": (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json is damaged"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "it has no manifest.json"),
    "a graph": (lambda d: _flip(d / "graphs" / "target_verify.pt2"), "target_verify.pt2 isn't the file.*its sha256 is"),
    "weights": (lambda d: _flip(d / "weights" / "draft.safetensors"), "draft.safetensors isn't the file"),
    "a missing graph": (lambda d: (d / "graphs" / "target_decode.pt2").unlink(), "target_decode.pt2 is missing"),
    "config cut short": (lambda d: (d / "neuron_config.json").write_text("{"), "neuron_config.json is damaged"),
    "unknown entry": (lambda d: _edit(d / "neuron_config.json", lambda c: c.update(x=1)), "doesn't know: x"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder(kind, copy):
    damage, message = DAMAGE[kind]
    damage(copy)
    with pytest.raises(ValueError, match=message):
        Eagle3NeuronModelForCausalLM.from_pretrained(copy)


def test_eos_and_criteria(model, pair):
    inputs = prompts(2, 6, 9)
    free = pair[0].generate(**inputs, do_sample=False, max_new_tokens=16)
    eos = [int(free[0, 6 + 4]), int(free[1, 6 + 9])]
    stats = assert_same_as_plain(model, pair[0], inputs, 16, eos_token_id=eos, pad_token_id=0)
    assert stats.generated < 2 * 15

    class AfterTen:
        def __call__(self, ids, scores):
            return torch.tensor([ids.shape[1] >= 10])

    out = model.generate(inputs["input_ids"][:1, -3:], max_new_tokens=16, stopping_criteria=[AfterTen()])
    assert out.shape[1] == 10
