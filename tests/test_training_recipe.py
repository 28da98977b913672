"""Recipes: what is read, what is refused with which words, and that each shipped one runs on a shrunk model."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from eagle3_hf.cli import build_app
from eagle3_hf.training.arguments import training_arguments
from eagle3_hf.training.dry_run import dry_run, shrunk_config
from eagle3_hf.training.recipe import load_recipe, parse_recipe

RECIPES = sorted(Path(__file__).parents[1].glob("recipes/*/recipe.yaml"))
MINIMAL = {"target": {"model": "smollm2"}}


def test_every_recipe_is_found():
    names = {path.parent.name for path in RECIPES}
    assert names == {"smollm2-135m-instruct", "llama-3.1-8b-instruct", "qwen3-8b", "gpt-oss-20b"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_dry_run_of_each_recipe(path, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable was read at import
    recipe = load_recipe(path)
    if recipe.target.model == "smollm2":
        recipe.target.model = "not/here"  # the config comes from `model_type`, as where there is no network
    facts = dry_run(recipe, tmp_path / "run")
    assert facts["family"] == recipe.target.model_type
    assert facts["updates"] == 3
    assert facts["loss"][-1] < facts["loss"][0]
    assert facts["generate tau"] >= 1
    config = yaml.safe_load((tmp_path / "run" / "draft" / "config.json").read_text())
    assert config["qk_norm"] is bool(recipe.draft.qk_norm)
    assert len(config["aux_hidden_state_layers"]) == len(recipe.draft.aux_hidden_state_layers)
    assert config["dtype"] == recipe.draft.dtype


def test_dry_run_needs_a_config_or_a_model_type(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # the variable was read at import
    with pytest.raises(ValueError, match=r"target\.model_type doesn't say"):
        shrunk_config(parse_recipe({"target": {"model": "no/such-model"}}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"objektive": {}}, "unknown section 'objektive': did you mean 'objective'"),
        ({"objective": {"step": 3}}, "unknown key objective.step: did you mean objective.steps"),
        ({"objective": {"learning_rate": 1.0}}, "did you mean training.learning_rate"),
        ({"training": {"learning_rat": 1.0}}, "unknown key training.learning_rat: did you mean training.learning_rate"),
        ({"training": {"vocab_size": 5}}, "did you mean draft.vocab_size"),
        ({"draft": {"vocab_size": "many"}}, "draft.vocab_size must be a whole number or null, got the text 'many'"),
        ({"draft": {"qk_norm": 1}}, "draft.qk_norm must be true or false or null, got the whole number 1"),
        ({"draft": {"aux_hidden_state_layers": [2, "x"]}}, r"aux_hidden_state_layers\[1\] must be a whole number"),
        ({"training": {"max_steps": 1.5}}, "training.max_steps must be a whole number, got the number 1.5"),
        ({"training": {"bf16": "yes"}}, "training.bf16 must be true or false"),
        ({"objective": 3}, "section objective must be a mapping"),
        ({"objective": {"kind": "plane"}}, "objective.kind is 'plane': did you mean 'plain'"),
        ({"objective": {"steps": 0}}, "objective.steps must be at least 1"),
        ({"objective": {"steps": 2, "step_weights": [1.0]}}, "1 weights for objective.steps 2"),
        ({"objective": {"loss": "kl_divergence"}}, "kl_divergence"),
        ({"data": {"held_out": 1.0}}, "data.held_out is a share below 1"),
        ({"draft": {"dtype": "float31"}}, "draft.dtype is 'float31': did you mean 'float32'"),
        ({"evaluation": {"generate_every": 7}, "training": {"eval_steps": 5}}, "must be a multiple of"),
    ],
)
def test_mistakes_are_named(content, words):
    with pytest.raises(ValueError, match=words):
        parse_recipe(MINIMAL | content)


def test_target_is_required():
    with pytest.raises(ValueError, match="section target is missing"):
        parse_recipe({"objective": {}})
    with pytest.raises(ValueError, match=r"target\.model is missing"):
        parse_recipe({"target": {"dtype": "float32"}})


def test_files_and_overrides(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("target: {model: a}\ntraining: {max_steps: 5, learning_rate: 1e-4}\nobjective:\n")
    recipe = load_recipe(path, ["training.max_steps=7", "draft.aux_hidden_state_layers=[1, 2]", "objective.steps=2"])
    assert recipe.training == {"max_steps": 7, "learning_rate": 1e-4}  # YAML 1.1 takes 1e-4 for a word
    assert recipe.draft.aux_hidden_state_layers == [1, 2]
    assert recipe.objective.weights == [1.0, 0.8]
    for override in ("training.max_steps", "max_steps=3", "=3", "training..x=3"):
        with pytest.raises(ValueError, match=r"--set takes section\.key=value"):
            load_recipe(path, [override])
    path.write_text("target: {model: a}\ntraining:\n  max_steps: 5\n  max_steps: 6\n")
    with pytest.raises(ValueError, match="'max_steps' is given twice, in lines 3 and 4"):
        load_recipe(path)
    path.write_text("target: [")
    with pytest.raises(ValueError, match=r"recipe\.yaml"):
        load_recipe(path)
    with pytest.raises(OSError, match="nowhere"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_a_recipe_survives_its_own_dump(tmp_path):
    for path in RECIPES:
        copy = tmp_path / "copy.yaml"
        copy.write_text(load_recipe(path).dump())
        assert dataclasses.asdict(load_recipe(copy)) == dataclasses.asdict(load_recipe(path))


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"per_device_train_batch_size": 4}, r"set data\.tokens_per_batch"),
        ({"save_strategy": "epoch"}, "use steps, or no"),
        ({"ignore_data_skip": True}, "other batches"),
        ({"metric_for_best_model": "loss"}, "highest tau"),
    ],
)
def test_training_arguments_that_make_no_sense_are_refused(tmp_path, training, words):
    recipe = parse_recipe({**MINIMAL, "training": {"output_dir": str(tmp_path), "max_steps": 1, **training}})
    with pytest.raises(ValueError, match=words):
        training_arguments(recipe)


def test_training_arguments_need_a_folder_and_a_length(tmp_path):
    with pytest.raises(ValueError, match=r"training\.output_dir is missing"):
        training_arguments(parse_recipe(MINIMAL))
    with pytest.raises(ValueError, match="how long to train"):
        training_arguments(parse_recipe({**MINIMAL, "training": {"output_dir": str(tmp_path)}}))


def test_report_to_and_other_arguments_pass_through(tmp_path):
    training = {"output_dir": str(tmp_path), "max_steps": 1, "report_to": "tensorboard", "use_cpu": True, "seed": 5}
    args = training_arguments(parse_recipe({**MINIMAL, "training": training}))
    assert args.report_to == ["tensorboard"] and args.seed == 5 and args.use_cpu
    training.pop("report_to")
    assert training_arguments(parse_recipe({**MINIMAL, "training": training})).report_to in ([], ["none"])


def test_command_line_reports_a_mistake_in_one_line(tmp_path):
    path = tmp_path / "recipe.yaml"
    shutil.copy(RECIPES[0], path)
    path.write_text(path.read_text().replace("steps:", "stepps:", 1))
    done = CliRunner().invoke(build_app(), ["train", str(path), "--dry-run"])
    assert done.exit_code == 2
    assert "stepps" in done.output and "did you mean" in done.output and "Traceback" not in done.output


def test_accelerate_configs_are_ones_that_accelerate_knows():
    from accelerate.commands.config.config_args import load_config_from_file

    for path in sorted(RECIPES[0].parents[1].glob("accelerate/*.yaml")):
        loaded = load_config_from_file(str(path))
        assert loaded.num_processes in (8, 16)
        assert str(loaded.mixed_precision) == "bf16"
