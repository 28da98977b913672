"""Every example runs on a tiny model and says what it should."""

import importlib.util
from pathlib import Path

import pytest
from eval_models import save_models

from eagle3_hf import Eagle3DraftModel

EXAMPLES = Path(__file__).parents[1] / "examples"
# Runs without a model; tests/test_rejection_processor.py has it.
ELSEWHERE = {"speculative_decoding_from_scratch"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def _load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested():
    tested = {"quickstart", "batch", "sampling", "chat", "evaluation", "adding_a_target"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} - ELSEWHERE == tested


@pytest.mark.parametrize("name", ["quickstart", "batch"])
def test_output_is_that_of_plain_generate(name, folders, capsys):
    target, draft, _ = folders
    _load(name).main(target, draft, max_new_tokens=8)
    assert "same tokens as plain generate(): True" in capsys.readouterr().out


def test_sampling(folders, capsys):
    target, draft, _ = folders
    _load("sampling").main(target, draft, max_new_tokens=8)
    out = capsys.readouterr().out
    assert "the same sampled text with a draft and without: True" in out
    assert out.count("tokens a target forward") == 2


def test_chat_keeps_the_history(folders, capsys):
    target, draft, _ = folders
    example = _load("chat")
    example.main(target, draft, max_new_tokens=6)
    out = capsys.readouterr().out
    assert all(f"user: {turn}" in out for turn in example.TURNS)
    assert "6 messages;" in out


def test_evaluation(folders, capsys, tmp_path, monkeypatch):
    from eagle3_hf.evaluation import methods

    pytest.importorskip("jinja2")
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))
    target, draft, _ = folders
    _load("evaluation").main(target, draft, str(tmp_path), max_new_tokens=6)
    lines = capsys.readouterr().out.splitlines()
    names = ["plain", "prompt lookup 10", "chain 2", "chain 4", "shy chain", "tree 4:3:12"]
    assert [line.partition(" tau ")[0].strip() for line in lines[:-1]] == names
    assert all(line.endswith("identical 100%") for line in lines[:-1])
    assert (tmp_path / "evaluation.html").read_text().startswith("<!doctype html>")


def test_adding_a_target(folders, capsys, tmp_path):
    example = _load("adding_a_target")
    example.main(folders[0], str(tmp_path / "new"), max_new_tokens=8)
    assert "same tokens as plain generate(): True" in capsys.readouterr().out
    assert Eagle3DraftModel.from_pretrained(tmp_path / "new").config.target_num_hidden_layers == 6
