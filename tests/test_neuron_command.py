"""`eagle3-hf export-neuron` and `optimum-cli export eagle3-neuron`, and backends whose packages aren't here."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from neuron_support import make_shallow_pair
from typer.testing import CliRunner

from eagle3_hf.cli import build_app
from eagle3_hf.neuron.backends import get_backend, neuron
from eagle3_hf.neuron.command import OneLineParser, add_arguments

SOURCE = Path(__file__).resolve().parents[1] / "src"
HAS_OPTIMUM = importlib.util.find_spec("optimum.commands.base") is not None
OPTIONS = ["--backend", "torch-export", "--batch_size", "2", "--sequence_length", "24", "--context_buckets", "8"]
OPTIONS += ["--num_speculative_tokens", "1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    target, draft = make_shallow_pair()
    target.save_pretrained(place / "target")
    draft.save_pretrained(place / "draft")
    return ["-m", str(place / "target"), "--draft_model", str(place / "draft")]


def _run(*arguments):
    return CliRunner().invoke(build_app(), ["export-neuron", *map(str, arguments)])


def test_export_and_validation(folders, tmp_path):
    result = _run(*folders, *OPTIONS, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "5 graphs in" in result.output and "32 tokens identical to plain generate()" in result.output
    assert (tmp_path / "out" / "manifest.json").is_file()
    again = _run(*folders, *OPTIONS, tmp_path / "out")
    assert again.exit_code == 2 and "isn't empty" in again.stderr and len(again.stderr.splitlines()) == 1


def test_split_and_padded(folders, tmp_path):
    result = _run(*folders, *OPTIONS, "--num_cores", "2", "--padded_hidden_size", "48", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert "5 graphs in" in result.output and "not validated" in result.output
    assert len(list((tmp_path / "out" / "weights").iterdir())) == 2
    result = _run(*folders, *OPTIONS, "--padded_hidden_size", "48", tmp_path / "padded")
    assert "32 tokens identical to plain generate()" in result.output


def test_validation_notices_a_difference(folders, tmp_path, monkeypatch):
    from eagle3_hf.neuron import families

    original = families.take_apart

    def damaged(*args):
        models = original(*args)
        models.stored["target.model.norm.weight"] = torch.randn(models.stored["target.model.norm.weight"].shape)
        return models

    monkeypatch.setattr("eagle3_hf.neuron.model.take_apart", damaged)
    result = _run(*folders, *OPTIONS, tmp_path / "out")
    assert result.exit_code == 2 and "don't write what the model writes" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "x", "out"], "required: --draft_model"),
        (["-m", "x", "--draft_model", "y", "--context_buckets", "8;9", "out"], "whole numbers with commas"),
        (["-m", "x", "--draft_model", "y", "--nonsense", "out"], "unrecognized arguments: --nonsense"),
        (["-m", "x", "--draft_model", "y", "--backend", "tpu", "out"], "backend must be one of"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr


def test_help_names_every_option():
    result = _run("--help")
    assert result.exit_code == 0
    parser = OneLineParser()
    add_arguments(parser)
    for action in parser._actions:
        assert all(option in result.stdout for option in action.option_strings)


def test_missing_packages_say_where_they_are():
    if importlib.util.find_spec("torch_neuronx") is not None:
        pytest.skip("torch_neuronx is installed")
    with pytest.raises(ImportError) as caught:
        get_backend("neuron")
    text = str(caught.value)
    assert "torch_neuronx" in text and "https://pip.repos.neuron.amazonaws.com" in text and "placeholder" in text
    result = _run("-m", "x", "--draft_model", "y", "out")
    assert result.exit_code == 2 and "pip.repos.neuron.amazonaws.com" in result.stderr


def test_a_package_that_raises_when_imported_counts_as_missing(tmp_path, monkeypatch):
    """What PyPI has under AWS' names does that; this one has another name, so that nothing plays torch_neuronx."""
    (tmp_path / "only_a_placeholder.py").write_text("raise ImportError('WRONG PACKAGE')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(neuron, "_PACKAGES", ("only_a_placeholder",))
    with pytest.raises(ImportError, match=r"WRONG PACKAGE.*pip.repos.neuron.amazonaws.com.*placeholders"):
        get_backend("neuron")


def test_the_namespace_has_no_init_files():
    inits = list((SOURCE / "optimum").rglob("__init__.py"))
    assert inits == [], "a package `optimum` of ours would hide the real one"


@pytest.mark.skipif(not HAS_OPTIMUM, reason="optimum isn't installed here")
def test_optimum_cli(folders, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    start = [sys.executable, "-c", "from optimum.commands.optimum_cli import main; main()", "export"]
    listed = subprocess.run([*start, "--help"], env=environment, capture_output=True, text=True)
    assert listed.returncode == 0 and "eagle3-neuron" in listed.stdout, listed.stderr
    command = [*start, "eagle3-neuron", *folders, *OPTIONS, str(tmp_path / "out")]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "32 tokens identical to plain generate()" in made.stderr
    wrong = subprocess.run([*command[:-1], "--num_cores", "3", str(tmp_path / "three")], env=environment,
                           capture_output=True, text=True)  # fmt: skip
    assert wrong.returncode == 1
    assert wrong.stderr.strip().splitlines()[-1].startswith("error: tensor_parallel_size 3 doesn't suit the target")
