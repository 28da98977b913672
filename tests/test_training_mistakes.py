"""Mistakes of a first day with `eagle3-hf train`: each is named before anything long runs, and none is ignored."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from training_models import tiny_recipe, tiny_target
from training_support import chat, save_target

from eagle3_hf.training.arguments import training_arguments
from eagle3_hf.training.data import load_rows
from eagle3_hf.training.initialise import new_draft
from eagle3_hf.training.plots import plot_training
from eagle3_hf.training.recipe import DraftSection, load_recipe, parse_recipe
from eagle3_hf.training.run import FailedElsewhereError
from eagle3_hf.training.run import _main_process_first as main_process_first
from eagle3_hf.training.sources import open_data

MINIMAL = {"target": {"model": "smollm2"}}


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("draft", "num_hidden_layers", 0), ("draft", "vocab_size", 0), ("draft", "head_dim", -1),
        ("draft", "fc_noise", -1.0), ("draft", "tree_top_k", 0), ("draft", "num_assistant_tokens", -3),
        ("data", "pack_length", 0), ("data", "limit", 0), ("data", "max_length", 0),
        ("objective", "step_decay", -1.0), ("objective", "step_decay", float("nan")),
        ("evaluation", "generate_every", -2), ("evaluation", "early_stopping_patience", -1),
        ("evaluation", "early_stopping_threshold", -1.0),
        ("training", "gradient_accumulation_steps", 0), ("training", "save_steps", 0), ("training", "seed", -1),
        ("training", "learning_rate", -1.0), ("training", "max_grad_norm", -1.0), ("training", "save_total_limit", 0),
    ],
)  # fmt: skip
def test_values_out_of_their_range_are_named(section, key, value):
    with pytest.raises(ValueError, match=rf"^{section}\.{key} must be (at least|above) \d.*, got {value}"):
        parse_recipe(MINIMAL | {section: {key: value}})


@pytest.mark.parametrize("values", [[0, 0], [1, -1]])
def test_step_weights_must_weigh_something(values):
    with pytest.raises(ValueError, match=r"objective\.step_weights must not be negative, nor all 0"):
        parse_recipe(MINIMAL | {"objective": {"steps": 2, "step_weights": values}})


def test_evaluations_that_would_never_happen_are_refused():
    with pytest.raises(ValueError, match=r"generate_every needs evaluations: set training\.eval_steps"):
        parse_recipe(MINIMAL | {"evaluation": {"generate_every": 4}})
    with pytest.raises(ValueError, match=r"training\.eval_steps needs held-out documents"):
        parse_recipe(MINIMAL | {"data": {"held_out": 0.0}, "training": {"eval_steps": 4}})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"sources": ["x"]}}, r"data\.sources is for features\.mode online"),
        ({"data": {"max_length": 5}}, r"data\.max_length is for features\.mode online"),
        ({"data": {"skip_bad": True}}, r"data\.skip_bad is for features\.mode online"),
        ({"features": {"teacher": "logits"}}, r"features\.teacher is for features\.mode online"),
        ({"features": {"mode": "online", "folder": "x"}}, r"features\.folder is for features\.mode offline"),
    ],
)
def test_keys_of_the_other_mode_are_refused(sections, words):
    with pytest.raises(ValueError, match=words):
        parse_recipe(MINIMAL | sections)


def test_an_override_that_is_no_yaml_is_named(tmp_path):
    (tmp_path / "recipe.yaml").write_text("target: {model: a}\n")
    with pytest.raises(ValueError, match=r"--set objective\.loss=\[: the value isn't YAML"):
        load_recipe(tmp_path / "recipe.yaml", ["objective.loss=["])


def test_an_odd_head_is_named():
    with pytest.raises(ValueError, match=r"draft\.head_dim 7 is odd"):
        new_draft(tiny_target(), DraftSection(head_dim=7))


def test_no_is_a_strategy_not_a_truth_value(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("target: {model: a}\ntraining: {max_steps: 5, output_dir: x, use_cpu: true, save_strategy: no}\n")
    recipe = load_recipe(path, ["training.eval_strategy=no"])
    assert recipe.training["eval_strategy"] == recipe.training["save_strategy"] == "no"
    args = training_arguments(recipe)
    assert args.eval_strategy == "no" and args.save_strategy == "no"


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"fp16": True}, r"training\.fp16 is for GPUs"),
        ({"dataloader_drop_last": True}, "there is no last one"),
        ({"bf16_full_eval": True}, "evaluation computes as training does"),
        ({"hub_model_id": "a/b"}, r"draft\.push_to_hub"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(tmp_path, training, words):
    with pytest.raises(ValueError, match=words):
        training_arguments(tiny_recipe(tmp_path, training=training))


def test_flex_attention_is_refused_on_a_cpu(tmp_path):
    with pytest.raises(ValueError, match=r"objective\.attention flex can't be trained on a CPU"):
        training_arguments(tiny_recipe(tmp_path, objective={"attention": "flex"}))


def test_more_layers_than_the_target_has():
    with pytest.raises(ValueError, match=r"draft\.num_hidden_layers is 9, the target has 4 to copy"):
        new_draft(tiny_target(), DraftSection(num_hidden_layers=9))
    assert len(new_draft(tiny_target(), DraftSection(num_hidden_layers=5, initialise="scratch")).layers) == 5


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", "", "a.jsonl is empty"),
        ("b.json", "", "b.json is empty"),
        ("c.jsonl", '{"prompt": "a"}\n{"prompt": \n', "c.jsonl, line 2 isn't JSON"),
        ("d.jsonl", '{"prompt": "a"}\n["b"]\n', "d.jsonl, line 2 is no JSON object"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        load_rows(str(tmp_path / name))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    save_target(folder / "target")
    save_target(folder / "wide", hidden_size=64)
    rows = [json.dumps({"messages": chat(f"what is a cat {i}", "yes no")}) + "\n" for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(rows))
    return folder


def test_features_of_another_model_are_named(conversations, tmp_path):
    from typer.testing import CliRunner

    from eagle3_hf.cli import build_app

    made = ["extract", "--data", str(conversations / "rows.jsonl"), "--out", str(tmp_path / "features")]
    done = CliRunner().invoke(build_app(), [*made, "--target", str(conversations / "target"), "--aux-layer", "1"])
    assert done.exit_code == 0, done.output
    features = {"folder": str(tmp_path / "features")}
    held_out = {"held_out": 0.3}
    assert len(open_data(tiny_recipe(tmp_path, conversations / "target", features=features, data=held_out)).train)
    with pytest.raises(ValueError, match=r"of another model: hidden size 32, target\.model has 64"):
        open_data(tiny_recipe(tmp_path, conversations / "wide", features=features, data=held_out))


@pytest.mark.parametrize(("share", "what"), [(0.999999, "training"), (1e-9, "held-out")])
def test_a_share_that_leaves_nothing_is_named(conversations, tmp_path, share, what):
    data = {"sources": [str(conversations / "rows.jsonl")], "held_out": share}
    recipe = tiny_recipe(tmp_path, conversations / "target", features={"mode": "online"}, data=data)
    with pytest.raises(ValueError, match=rf"data\.held_out .* of 6 documents leaves no {what} document"):
        open_data(recipe)


def test_a_wrong_target_is_named(conversations, tmp_path):
    with pytest.raises(ValueError, match=r"target\.model: there is no folder '/nowhere'"):
        open_data(tiny_recipe(tmp_path, "/nowhere"))
    recipe = tiny_recipe(tmp_path, conversations / "target", features={"folder": "x"})
    recipe.target.model_type = "qwen3"
    with pytest.raises(ValueError, match=r"target\.model_type is qwen3, the target's config says llama"):
        open_data(recipe)


def test_an_error_of_the_first_process_ends_the_others(monkeypatch):
    """Process 1 hears the words of process 0 instead of waiting for a connection that is gone."""
    sent: list[str | None] = []

    def broadcast(outcome, src, device):
        if sent:
            outcome[0] = sent[0]
        else:
            sent.append(outcome[0])

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    first, second = (SimpleNamespace(world_size=2, process_index=rank, device="cpu") for rank in (0, 1))
    with pytest.raises(ValueError, match="add --resume"), main_process_first(first):
        raise ValueError("holds a run: add --resume")
    words = "process 0: holds a run: add --resume"
    with pytest.raises(FailedElsewhereError, match=words), main_process_first(second):
        pytest.fail("it goes on")
    sent.clear()
    for args in (first, second):
        with main_process_first(args):
            pass
    assert sent == [None]


def test_curves_of_many_steps(tmp_path):
    history = [{"step": s, "loss": 1.0, **{f"accuracy_{k}": torch.rand(()).item() for k in range(30)}} for s in (1, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # legends that don't fit are a warning of matplotlib's layout
        plot_training(history, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
