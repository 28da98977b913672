"""Exports read by the servers' own config parsers, where those can be imported; docs/checkpoints.md says how.

None of them is a dependency: each test is skipped where its package isn't on the path.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import FIXTURES

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.checkpoints import export_draft

SPECULATORS = ("speculators", "speculators-qwen3", "speculators-two-layers", "speculators-eagle31", "eagle")
SPECFORGE = ("specforge-ids", "eagle31", "five-aux", "modelopt-no-aux")


def exported(name: str, format: str, folder: Path) -> tuple[Eagle3DraftModel, Path]:
    draft = Eagle3DraftModel.from_pretrained(FIXTURES[name].write(folder / "in"), dtype=torch.float32)
    return draft, export_draft(draft, folder / "out", format, tokens=3).folder


def same_shape(config, draft: Eagle3DraftModel) -> None:
    ours = draft.config
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
                 "head_dim", "vocab_size", "draft_vocab_size", "rms_norm_eps", "max_position_embeddings"):  # fmt: skip
        assert getattr(config, name) == getattr(ours, name), name
    assert config.rope_parameters["rope_theta"] == ours.rope_parameters["rope_theta"]
    ids = getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    assert (None if ids is None else list(ids)) == ours.aux_hidden_state_layers


@pytest.mark.parametrize("name", SPECULATORS)
def test_vllm_reads_speculators(name: str, tmp_path: Path):
    parser = pytest.importorskip("vllm.transformers_utils.configs.speculators.base").SpeculatorsConfig
    draft, folder = exported(name, "speculators", tmp_path)
    config = parser.from_pretrained(folder)
    kind = "Qwen3" if draft.config.qk_norm else "Llama"
    assert config.architectures == [f"Eagle3{kind}ForCausalLM"]
    same_shape(config, draft)
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert getattr(config, flag) == getattr(draft.config, flag), flag
    written = json.loads((folder / "config.json").read_text())
    assert parser.extract_vllm_speculative_config(written) == {"method": "eagle3", "num_speculative_tokens": 3}


@pytest.mark.parametrize(("name", "format"), [("eagle", "eagle"), *((name, "specforge") for name in SPECFORGE)])
def test_vllm_reads_the_other_layouts(name: str, format: str, tmp_path: Path):
    wrap = pytest.importorskip("vllm.transformers_utils.configs.eagle").EAGLEConfig
    get_config = pytest.importorskip("vllm.transformers_utils.config").get_config
    draft, folder = exported(name, format, tmp_path)
    config = wrap(get_config(str(folder), trust_remote_code=False), method="eagle3", model_type="eagle")
    assert config.architectures == ["Eagle3LlamaForCausalLM" if format == "eagle" else "LlamaForCausalLMEagle3"]
    same_shape(config, draft)
    if format == "specforge":
        assert config.eagle_config["use_aux_hidden_state"] is draft.config.use_aux_hidden_state


def test_vllm_knows_the_architectures():
    registry = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry
    known = set(registry.get_supported_archs())
    assert {"Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLMEagle3"} <= known


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_reads_its_own(name: str, tmp_path: Path):
    parser = pytest.importorskip("speculators").SpeculatorModelConfig
    draft, folder = exported(name, "speculators", tmp_path)
    config = parser.from_pretrained(folder)
    assert type(config).__name__ == "Eagle3SpeculatorConfig"
    assert config.draft_vocab_size == draft.config.draft_vocab_size
    assert config.norm_before_residual == draft.config.norm_before_residual
    assert config.transformer_layer_config.hidden_size == draft.config.hidden_size


@pytest.mark.parametrize("name", SPECFORGE)
def test_sglang_reads_specforge(name: str, tmp_path: Path):
    parser = pytest.importorskip("sglang.srt.utils.hf_transformers_utils").get_config
    draft, folder = exported(name, "specforge", tmp_path)
    config = parser(str(folder), trust_remote_code=False)
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    same_shape(config, draft)
