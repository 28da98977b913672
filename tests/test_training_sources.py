"""Recipes on real inputs: stored features, conversations with the target in the loop, an ordinary small model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_models import AUX, HIDDEN, VOCAB, documents, tiny_recipe, tiny_target
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.cli import build_app
from eagle3_hf.training.run import run
from eagle3_hf.training.sources import evaluation_documents, open_data

COUNT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The target as a folder, its answers as rows of tokens, and as a shard of features."""
    folder = tmp_path_factory.mktemp("sources")
    target = tiny_target(folder=folder / "target")
    items = documents(target, COUNT)
    with (folder / "rows.jsonl").open("w") as out:
        for item in items:
            row = {"input_ids": item["input_ids"].tolist(), "loss_mask": item["loss_mask"].tolist(), "temperature": 0.0}
            out.write(json.dumps(row) + "\n")
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    learned = [torch.cat([item["loss_mask"][1:], torch.zeros(1, dtype=torch.bool)]) for item in items]
    (folder / "features").mkdir()
    save_file(
        {
            "aux": torch.cat([item["features"] for item in items]),
            "final": torch.cat([item["teacher_hidden"] for item in items]),
            "ids": torch.cat([item["input_ids"] for item in items]).int(),
            "argmax": torch.cat([item["teacher_argmax"].where(m, -1) for item, m in zip(items, learned)]).int(),
            "answer": torch.cat([item["loss_mask"] for item in items]),
            "offsets": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            "index": torch.arange(COUNT) * 7919,
            "greedy": torch.arange(COUNT) % 2 == 0,
        },
        folder / "features" / "shard-00000.safetensors",
        metadata={"aux_layers": json.dumps(AUX), "target": "target"},
    )
    return folder


def recipe_of(folder: Path, output: Path, **sections):
    training = {"max_steps": 3, "eval_steps": 3, "save_steps": 3, **sections.pop("training", {})}
    data = {"held_out": 0.3, **sections.pop("data", {})}
    return tiny_recipe(output, folder / "target", training=training, data=data, **sections)


def test_stored_features(folder, tmp_path):
    recipe = recipe_of(
        folder,
        tmp_path,
        features={"folder": str(folder / "features")},
        draft={"vocab_size": 30},
        evaluation={"generate_every": 3, "generate_prompts": 2, "generate_new_tokens": 8},
    )
    data = open_data(recipe)
    assert len(data.train) + len(data.train.dataset.held_out) == COUNT
    assert all(data.train.dataset.greedy[i] for i in data.held_out.documents)
    assert all(len(prompt) == 4 for prompt in data.prompts)
    result = run(recipe, data)
    assert result.finished and result.numbers["generation"]["eval_generate_tau"] >= 1
    draft = Eagle3DraftModel.from_pretrained(result.folder)
    assert draft.config.draft_vocab_size == 30 and draft.t2d[2]  # the stop token is always in it
    assert draft.config.aux_hidden_state_layers == AUX


def test_the_target_in_the_loop_gives_the_same_run(folder, tmp_path):
    """Online and stored features are the same numbers, so the updates are; packed rows differ by rounding only."""
    rows = {"sources": [str(folder / "rows.jsonl")], "held_out": 0.0}
    training = {"optim": "sgd", "max_grad_norm": 0.0, "eval_steps": None, "eval_strategy": "no", "max_steps": 1}
    training |= {"save_steps": 10}
    stored = recipe_of(
        folder, tmp_path / "stored", features={"folder": str(folder / "features")}, training=training,
        data={"held_out": 0.0, "tokens_per_batch": 100_000, "window": 1000},
    )  # fmt: skip
    online = recipe_of(
        folder, tmp_path / "online", features={"mode": "online"}, training=training,
        data={**rows, "tokens_per_batch": 100_000, "window": 1000}, draft={"aux_hidden_state_layers": AUX},
    )  # fmt: skip
    packed = recipe_of(
        folder, tmp_path / "packed", features={"mode": "online", "teacher": "logits"}, training=training,
        data={**rows, "tokens_per_batch": 100_000, "window": 1000, "pack_length": 128},
        draft={"aux_hidden_state_layers": AUX},
    )  # fmt: skip
    results = [run(recipe, open_data(recipe)) for recipe in (stored, online, packed)]
    first, *others = [load_file(result.folder / "model.safetensors") for result in results]
    start = load_file(tmp_path / "stored" / "prepared" / "draft" / "model.safetensors")
    assert (first["fc.weight"] - start["fc.weight"]).abs().max() > 1e-4
    for other in others:
        for name, tensor in first.items():
            torch.testing.assert_close(other[name], tensor, atol=5e-6, rtol=0, msg=name)


def test_an_ordinary_small_model_learns(folder, tmp_path):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    recipe = recipe_of(
        folder,
        tmp_path / "run",
        objective={"kind": "plain", "loss": "kl", "measure_every": 1},
        draft={"model": str(tmp_path / "small")},
        features={"mode": "online"},
        data={"sources": [str(folder / "rows.jsonl")]},
        training={"max_steps": 8, "learning_rate": 1e-2, "save_steps": 4},
    )
    result = run(recipe, open_data(recipe))
    losses = [entry["loss"] for entry in result.numbers["losses"]]
    assert losses[-1] < 0.8 * losses[0]
    assert result.numbers["evaluation"]["eval_tau"] > 1
    small = AutoModelForCausalLM.from_pretrained(result.folder)
    assert torch.equal(small.lm_head.weight, small.model.embed_tokens.weight)
    # Tied weights are stored once, and resuming knows that.
    more = recipe_of(
        folder,
        tmp_path / "run",
        objective={"kind": "plain", "loss": "kl", "measure_every": 1},
        draft={"model": str(tmp_path / "small")},
        features={"mode": "online"},
        data={"sources": [str(folder / "rows.jsonl")]},
        training={"max_steps": 9, "learning_rate": 1e-2, "save_steps": 4},
    )
    assert run(more, open_data(more), resume=True).updates == 9


def test_the_command_trains_and_goes_on(folder, tmp_path):
    recipe = recipe_of(folder, tmp_path / "run", features={"folder": str(folder / "features")})
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.dump())
    app, runner = build_app(), CliRunner()
    done = runner.invoke(app, ["train", str(path)])
    assert done.exit_code == 0, done.output
    assert "3 updates done; the draft is in" in done.output
    again = runner.invoke(app, ["train", str(path)])
    assert again.exit_code == 2 and "add --resume" in again.output
    more = runner.invoke(app, ["train", str(path), "--resume", "--set", "training.max_steps=4"])
    assert more.exit_code == 0 and "4 updates done" in more.output


def test_what_is_missing_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"features\.folder is missing"):
        open_data(recipe_of(folder, tmp_path))
    with pytest.raises(ValueError, match="eagle3-hf extract"):
        open_data(recipe_of(folder, tmp_path, features={"folder": str(tmp_path)}))
    with pytest.raises(ValueError, match=r"data\.sources is missing"):
        open_data(recipe_of(folder, tmp_path, features={"mode": "online"}))
    recipe = recipe_of(folder, tmp_path, features={"folder": str(folder / "features")})
    dataset = open_data(recipe).train.dataset
    assert evaluation_documents(dataset, 3) == [i for i in dataset.held_out if dataset.greedy[i]][:3]
