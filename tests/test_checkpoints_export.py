"""Exports: loading, writing and loading again changes no bit; what a layout can't hold is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import AUX, DRAFT_VOCAB, EAGLE, FIXTURES, HIDDEN, VOCAB, base_tensors, llama, mapped, write

from eagle3_hf import Eagle3DraftModel
from eagle3_hf.checkpoints import FORMATS, CheckpointFiles, export_draft

# What each published variant can be written as. `transformers` holds all of them.
HOLDS = {
    "eagle": {"eagle", "specforge", "speculators"},
    "eagle-vicuna-wrong-layer-count": {"eagle", "specforge", "speculators"},
    "eagle-70b-wider-target": {"eagle", "specforge", "speculators"},
    "eagle-sharded-bin-extras": {"eagle", "specforge", "speculators"},
    "specforge": {"eagle", "specforge", "speculators"},
    "specforge-ids": {"eagle", "specforge", "speculators"},
    "specforge-embeddings-prefix": {"eagle", "specforge", "speculators"},
    "specforge-fc-bias": {"specforge"},
    "eagle31": {"specforge", "speculators"},
    "eagle31-legacy-norms": {"specforge", "speculators"},
    "five-aux": {"specforge", "speculators"},
    "automodel": {"eagle", "specforge", "speculators"},
    "speculators": {"speculators"},
    "speculators-norm-before-fc": {"speculators"},
    "speculators-eagle31": {"speculators"},
    "speculators-qwen3": {"speculators"},
    "speculators-two-layers": {"speculators"},
    "speculators-wider-target": {"speculators"},
    "modelopt": {"eagle", "specforge", "speculators"},
    "modelopt-pruned-without-t2d": {"eagle", "specforge", "speculators"},
    "modelopt-no-final-norm": set(),
    "modelopt-norm-before-fc-boundary-ids": {"specforge", "speculators"},
    "modelopt-yarn": {"specforge", "speculators"},
    "modelopt-deep": {"speculators"},
    "modelopt-no-aux": {"specforge"},
    "modelopt-no-aux-no-hidden-norm": {"specforge"},
    "angelslim": {"eagle", "specforge", "speculators"},
    "angelslim-head-dim-trap": {"speculators"},
    "angelslim-multimodal-rope": {"eagle", "specforge", "speculators"},
}
_FILE_MATTERS = {"name_or_path", "_name_or_path", "dtype", "torch_dtype", "transformers_version", "architectures"}


def config_of(draft: Eagle3DraftModel) -> dict:
    return {key: value for key, value in draft.config.to_dict().items() if key not in _FILE_MATTERS}


def test_every_fixture_is_in_the_table():
    assert set(HOLDS) == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_round_trip(name: str, tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES[name].write(tmp_path / "published"), dtype=torch.float32)
    for format in FORMATS:
        if format not in HOLDS[name] | {"transformers"}:
            with pytest.raises(ValueError, match=f"format '{format}' can't hold this draft"):
                export_draft(draft, tmp_path / format, format)
            assert not (tmp_path / format).exists()
            continue
        export_draft(draft, tmp_path / format, format)
        again = Eagle3DraftModel.from_pretrained(tmp_path / format, dtype=torch.float32)
        assert again.provenance.family == format
        assert config_of(again) == config_of(draft)
        before, after = draft.state_dict(), again.state_dict()
        assert set(before) == set(after)
        for key, tensor in before.items():
            assert after[key].dtype == tensor.dtype
            assert torch.equal(after[key], tensor), (format, key)
        # The loader found nothing to put right in what we wrote.
        assert again.provenance.overridden == []


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_survives(format: str, dtype: torch.dtype, tmp_path: Path):
    folder = FIXTURES["eagle"].write(tmp_path / "published")
    draft = Eagle3DraftModel.from_pretrained(folder, dtype=dtype)
    export_draft(draft, tmp_path / "out", format)
    again = Eagle3DraftModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(draft.state_dict().values(), again.state_dict().values()))


def written(name: str, format: str, folder: Path) -> tuple[dict, dict[str, torch.Tensor]]:
    draft = Eagle3DraftModel.from_pretrained(FIXTURES[name].write(folder / "published"))
    export_draft(draft, folder / "out", format)
    files = CheckpointFiles(str(folder / "out"))
    return files.config(), files.read()[0]


def test_aux_ids_are_in_the_convention_of_the_destination(tmp_path: Path):
    config, _ = written("specforge-ids", "specforge", tmp_path / "a")  # our ids: 2, 4, 6
    assert config["eagle_config"][AUX] == [1, 3, 5]  # SGLang adds one
    assert config[AUX] == [2, 4, 6]  # vLLM takes them as they are
    config, _ = written("specforge-ids", "speculators", tmp_path / "b")
    assert config[AUX] == [2, 4, 6]


def test_eagle_layout_is_what_its_code_reads(tmp_path: Path):
    config, tensors = written("specforge", "eagle", tmp_path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert (tmp_path / "out" / "pytorch_model.bin").is_file()
    expected = set(mapped()())
    assert set(tensors) == expected
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool


def test_full_vocabulary_has_no_map_in_the_file(tmp_path: Path):
    _, tensors = written("modelopt", "specforge", tmp_path)
    assert not {"d2t", "t2d"} & set(tensors)


def test_eagle_refuses_other_states_than_its_code_reads(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(
        FIXTURES["eagle"].write(tmp_path / "in", target_num_hidden_layers=8), aux_hidden_state_layers=[1, 4, 6]
    )
    with pytest.raises(ValueError, match=r"aux ids \[1, 4, 6\]"):
        export_draft(draft, tmp_path / "out", "eagle")
    draft.config.aux_hidden_state_layers = [2, 4, 5]
    assert export_draft(draft, tmp_path / "out", "eagle").warnings == []


def test_eagle_warns_where_it_cannot_know(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["specforge-ids"].write(tmp_path / "in"))
    assert "can't be checked" in export_draft(draft, tmp_path / "out", "eagle").warnings[0]


def test_specforge_has_no_word_for_embeddings(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["specforge"].write(tmp_path / "in"))
    draft.config.aux_hidden_state_layers = [0, 4, 5]
    with pytest.raises(ValueError, match="aux id 0"):
        export_draft(draft, tmp_path / "out", "specforge")


def test_sliding_window_survives_where_it_can(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["eagle"].write(tmp_path / "in", sliding_window=64))
    assert any("window of 64" in text for text in draft.provenance.warnings)
    export_draft(draft, tmp_path / "sf", "specforge")
    assert Eagle3DraftModel.from_pretrained(tmp_path / "sf").config.sliding_window == 64
    with pytest.raises(ValueError, match="sliding_window"):
        export_draft(draft, tmp_path / "sp", "speculators")


def test_lines_to_paste(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["specforge"].write(tmp_path / "in"))
    done = export_draft(draft, tmp_path / "out", "specforge", tokens=5)
    line = json.loads(done.serving["vLLM --speculative-config"])
    assert line == {"method": "eagle3", "model": str(tmp_path / "out"), "num_speculative_tokens": 5}
    flags = done.serving["SGLang"].split()
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "6"
    assert flags[flags.index("--speculative-draft-model-path") + 1] == str(tmp_path / "out")


@pytest.mark.parametrize("format", ["speculators", "transformers"])
def test_number_of_tokens_goes_into_the_file(format: str, tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["speculators"].write(tmp_path / "in"))
    export_draft(draft, tmp_path / "out", format, tokens=7)
    assert Eagle3DraftModel.from_pretrained(tmp_path / "out").generation_config.num_assistant_tokens == 7
    assert draft.generation_config.num_assistant_tokens == 3
    export_draft(draft, tmp_path / "same", format)
    assert Eagle3DraftModel.from_pretrained(tmp_path / "same").generation_config.num_assistant_tokens == 3


def test_errors(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["specforge"].write(tmp_path / "in"))
    with pytest.raises(ValueError, match=r"format must be one of .*speculators.*'gguf'"):
        export_draft(draft, tmp_path / "out", "gguf")
    with pytest.raises(OSError, match="holds files already"):
        export_draft(draft, tmp_path / "in", "eagle")


def test_logit_scale_is_part_of_the_head(tmp_path: Path):
    tensors = base_tensors(draft_vocab=VOCAB)
    config = llama(**EAGLE) | {"draft_vocab_size": VOCAB, "logit_scale": 0.3}
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, config, tensors))
    assert torch.equal(draft.lm_head.weight, tensors["lm_head.weight"] * 0.3)
    assert draft.lm_head.weight.shape == (VOCAB, HIDDEN)
