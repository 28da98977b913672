"""Writing and reading the exported folder when something goes wrong; graphs uncompiled, so that it costs little."""

import json
import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch
from neuron_support import InProcessBackend, make_pair
from support import make_draft, make_target

from eagle3_hf.neuron import Eagle3NeuronConfig, Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.artefact import read_manifest
from eagle3_hf.neuron.command import run
from eagle3_hf.neuron.families import take_apart

OPTIONS = {"sequence_length": 24, "context_buckets": [8], "num_speculative_tokens": 2}


@pytest.fixture(scope="module")
def pair():
    target = make_target("llama", num_hidden_layers=1)
    return target, make_draft(target, aux_hidden_state_layers=[0, 1], num_aux_hidden_states=2)


@pytest.fixture
def backend(monkeypatch):
    made = InProcessBackend()
    monkeypatch.setattr("eagle3_hf.neuron.model.get_backend", lambda *_: made)
    return made


@pytest.fixture
def export(pair, backend):
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(*pair, **OPTIONS)
    return lambda output: Eagle3NeuronModelForCausalLM.export(*pair, config, output=output)


class Breaks(InProcessBackend):
    """Stops at the third graph, as a full disk or a person does."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def compile(self, graph, stored, path):
        if len(self.graphs) == 2:
            path.write_text("half a")
            raise self.error
        return super().compile(graph, stored, path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("there_before", [True, False])
def test_an_export_broken_off_leaves_nothing_behind(error, there_before, export, backend, tmp_path, monkeypatch):
    folder = tmp_path / "a" / "out"
    if there_before:
        folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("eagle3_hf.neuron.model.get_backend", lambda *_: Breaks(error))
        with pytest.raises(type(error)):
            export(folder)
    assert folder.exists() == there_before and not list(tmp_path.rglob("out/*"))
    export(folder)
    Eagle3NeuronModelForCausalLM.from_pretrained(folder)


def test_an_export_that_was_killed(export, tmp_path):
    export(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()  # it is written last
    for work in (export, Eagle3NeuronModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"no manifest.json.*broken off or copied in part.*delete it"):
            work(tmp_path / "out")


def test_a_copy_broken_off_leaves_nothing_behind(export, tmp_path, monkeypatch):
    model = export(None)
    names = []
    copy = shutil.copyfile

    def full(source, place, **kwargs):
        names.append(place)
        if len(names) == 4:
            raise OSError(28, "No space left on device")
        return copy(source, place, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", full)
        with pytest.raises((OSError, shutil.Error)):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(tmp_path / "saved")
    Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_every_partial_copy_is_noticed(export, tmp_path):
    export(tmp_path / "out")
    whole = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert len(whole) > 10
    for path in whole:
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
            Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")
        for damaged in (data[: len(data) // 2], b"", b"\xff\xfe" + data):
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
                Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")
        path.write_bytes(data)
    Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_place_that_can_not_be_written_is_known_before_anything_is_loaded(export, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_hf.neuron.model.load_pair", mock.Mock(side_effect=AssertionError("was loaded")))
    monkeypatch.setattr("eagle3_hf.neuron.families.load_pair", mock.Mock(side_effect=AssertionError("was loaded")))
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    for place, message in (
        ("file", "isn't a folder"), ("file/out", "file isn.t a folder"), ("full", "isn't empty"),
    ):  # fmt: skip
        with pytest.raises((ValueError, OSError), match=message):
            export(tmp_path / place)
    assert (tmp_path / "full" / "mine.txt").read_text() == "x"
    arguments = dict.fromkeys(("revision", "instance_type", "kv_buckets", "padded_hidden_size"))
    arguments |= {"model": "x", "draft_model": "y", "backend": "torch-export", "output": tmp_path / "full"}
    with pytest.raises(ValueError, match="isn't empty"):
        run(mock.Mock(**arguments))


def test_what_a_folder_is_not_asked_for(export, tmp_path):
    export(tmp_path / "out")
    load = Eagle3NeuronModelForCausalLM.from_pretrained
    with pytest.raises(ValueError, match=r"draft_model.*holds its draft"):
        load(tmp_path / "out", draft_model="another")
    with pytest.raises(ValueError, match="num_cores 1 and tensor_parallel_size 2 say different things"):
        load(tmp_path / "out", num_cores=1, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="auto_cast_type 'bf16' and torch_dtype 'float32' say different things"):
        load(tmp_path / "out", auto_cast_type="bf16", torch_dtype="float32")
    load(tmp_path / "out", num_cores=1, tensor_parallel_size=1, torch_dtype=torch.float32, auto_cast_type="fp32")
    with pytest.raises(ValueError, match="torch_dtype 'float32' -> 'bfloat16'"):
        load(tmp_path / "out", torch_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"doesn't know \['num_drafts'\]"):
        load(tmp_path / "out", num_drafts=2)


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": "2"}, {"batch_size": 2.0}, {"batch_size": True}, {"batch_size": 0}, {"batch_size": None},
        {"sequence_length": "64"}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": 1.5},
        {"tensor_parallel_size": "2"}, {"padded_hidden_size": "3072"}, {"padded_hidden_size": 0},
        {"context_buckets": 64}, {"context_buckets": ["64"]}, {"context_buckets": [64.0]}, {"context_buckets": "64"},
        {"kv_buckets": 64}, {"kv_buckets": [None]}, {"do_sample": "false"}, {"fuse_step": 1},
        {"fuse_draft_loop": None}, {"torch_dtype": 32}, {"torch_dtype": torch.int8}, {"backend": None},
    ],
    ids=str,
)  # fmt: skip
def test_values_of_the_wrong_kind_are_named(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Eagle3NeuronConfig(**values)


def test_graphs_of_another_torch(export, backend, tmp_path, monkeypatch):
    export(tmp_path / "out")
    monkeypatch.setattr(backend, "load_all", mock.Mock(side_effect=RuntimeError("unknown opcode")))
    with pytest.raises(RuntimeError, match=r"^unknown opcode"):
        Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")
    other = replace(read_manifest(tmp_path / "out"), versions={"torch": "1.9"})
    monkeypatch.setattr("eagle3_hf.neuron.artefact.read_manifest", lambda _: other)
    with pytest.raises(RuntimeError, match=r"exported with torch 1.9.*can't be read by torch.*export again.*opcode"):
        Eagle3NeuronModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_vision_language_model_is_refused_by_its_own_name():
    from vision_models import llava

    target, _ = make_pair()
    with pytest.raises(ValueError, match="'llava' can't be exported"):
        Eagle3NeuronModelForCausalLM.get_neuron_config(llava())
    with pytest.raises(ValueError, match="'llava' can't be exported"):
        take_apart(llava(), make_draft(target))


def test_a_draft_of_another_target(pair, backend, tmp_path):
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(*pair, **OPTIONS)
    wide = make_target("llama", hidden_size=48, num_hidden_layers=1)
    other = make_draft(wide, aux_hidden_state_layers=[0, 1], num_aux_hidden_states=2)
    deep = make_draft(pair[0], aux_hidden_state_layers=[0, 7], num_aux_hidden_states=2)
    for draft, message in ((other, "hidden"), (deep, "7")):
        with pytest.raises(ValueError, match=message):
            Eagle3NeuronModelForCausalLM.export(pair[0], draft, config, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_manifest_comes_last(export, tmp_path):
    export(tmp_path / "out")
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert max(times, key=times.__getitem__) == "manifest.json"
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["format"] == 2
