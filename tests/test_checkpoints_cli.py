"""`eagle3-hf inspect`, `export` and `probe` on tiny checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import FIXTURES, HIDDEN, LAYERS, VOCAB, full, modelopt, write
from support import make_draft, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from eagle3_hf import Eagle3DraftModel, disable_eagle3
from eagle3_hf.cli import build_app


def run(*arguments: object):
    return CliRunner().invoke(build_app(), [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_inspect(tmp_path: Path):
    folder = FIXTURES["angelslim-head-dim-trap"].write(tmp_path / "draft")
    result = run("inspect", folder, "--json", tmp_path / "record.json")
    assert result.exit_code == 0, result.output
    for text in (
        "angelslim (config key aux_hidden_states_layer_ids)",
        "[2, 4, 5] from aux_hidden_states_layer_ids = [1, 3, 4]",
        "midlayer.hidden_norm.weight -> layers.0.hidden_norm.weight",
        "head_dim: config says 4, weights say 8",
        "12 of 40 tokens, map by offsets",
        "layers.0.self_attn.o_proj.bias: zeros",
    ):
        assert text in result.output
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["provenance"]["family"] == "angelslim"
    assert record["config"]["head_dim"] == 8


def test_inspect_refuses_in_one_line(tmp_path: Path):
    folder = FIXTURES["eagle"].write(tmp_path)
    torch.save({"fc.weight": torch.zeros(2, 6)}, folder / "pytorch_model.bin")
    result = run("inspect", folder)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert run("inspect", tmp_path / "nothing").exit_code == 2


def test_export(tmp_path: Path):
    folder = FIXTURES["specforge-ids"].write(tmp_path / "in")
    result = run("export", folder, tmp_path / "out", "--format", "speculators", "-K", 5)
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if '"method"' in line)
    assert json.loads(line)["num_speculative_tokens"] == 5
    assert Eagle3DraftModel.from_pretrained(tmp_path / "out").provenance.family == "speculators"


def test_export_errors(tmp_path: Path):
    folder = FIXTURES["speculators-qwen3"].write(tmp_path / "in")
    result = run("export", folder, tmp_path / "out", "--format", "eagle")
    assert result.exit_code == 2
    assert "norm_before_residual" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = make_target("llama", num_hidden_layers=8)
    draft = make_draft(target, aux_hidden_state_layers=[2, 4, 6])
    words = {str(i): i for i in range(15)} | {"[UNK]": 15}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    disable_eagle3(target).save_pretrained(tmp_path / "target")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    return tmp_path / "target", tmp_path / "draft"


def test_probe(pair: tuple[Path, Path], tmp_path: Path):
    target, draft = pair
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "3 4 5 6"}\n{"prompt": "7 8 9"}\n')
    result = run(
        "probe", "--target", target, "--draft", draft, "--prompts", tmp_path / "prompts.jsonl",
        "--max-new-tokens", 8, "--json", tmp_path / "out.json",
    )  # fmt: skip
    verdict = json.loads((tmp_path / "out.json").read_text())
    assert result.exit_code == (0 if verdict["best"] == "as loaded" else 1)
    assert len(verdict["readings"]) >= 8
    assert {reading["places"] for reading in verdict["readings"]} == {16}
    assert "as loaded" in result.stdout
    assert verdict["text"] in result.stdout


def test_export_borrows_the_targets_head(tmp_path: Path):
    folder = write(tmp_path / "in", modelopt(), full(drop="lm_head.weight")())
    refusal = run("export", folder, tmp_path / "out", "-f", "specforge")
    assert refusal.exit_code == 2 and "--target" in refusal.stderr
    target = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=8, num_hidden_layers=LAYERS, num_attention_heads=2
        )
    )
    target.save_pretrained(tmp_path / "target")
    result = run("export", folder, tmp_path / "out", "-f", "specforge", "--target", tmp_path / "target")
    assert result.exit_code == 0, result.output
    again = Eagle3DraftModel.from_pretrained(tmp_path / "out")
    assert torch.equal(again.lm_head.weight, target.lm_head.weight)
    assert again.config.target_num_hidden_layers == LAYERS
