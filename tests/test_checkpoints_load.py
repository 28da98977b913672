"""Every published layout and variant loads, and says what was done to it."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import (
    AUX,
    DRAFT_VOCAB,
    EAGLE,
    FIXTURES,
    HIDDEN,
    KEPT,
    LAYERS,
    MLP,
    VOCAB,
    Fixture,
    base_tensors,
    llama,
    mapped,
    modelopt,
    speculators,
    vocabulary_map,
    write,
)
from transformers import LlamaConfig

from eagle3_hf import AutoEagle3Target, Eagle3Config, Eagle3DraftModel
from eagle3_hf.checkpoints import fit_target_vocabulary
from eagle3_hf.target import check_draft_fits


@pytest.fixture(params=FIXTURES)
def fixture(request: pytest.FixtureRequest) -> Fixture:
    return FIXTURES[request.param]


def target(vocab: int = VOCAB, layers: int = LAYERS):
    torch.manual_seed(0)
    return AutoEagle3Target.from_config(
        LlamaConfig(vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=layers,
                    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def test_loads(fixture: Fixture, tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(fixture.write(tmp_path))
    record = draft.provenance
    assert record.family == fixture.family
    assert draft.config.aux_hidden_state_layers == fixture.aux
    for name, value in fixture.expect.items():
        assert getattr(draft.config, name) == value, name
    assert not draft.training
    # Every tensor of the file is in the model bit for bit, or on record as dropped.
    stored, state = fixture.tensors(), draft.state_dict()
    for name, tensor in stored.items():
        if name in record.dropped:
            continue
        assert torch.equal(
            state[record.renamed.get(name, name)], tensor.to(state[record.renamed.get(name, name)].dtype)
        )
    new = set(state) - {record.renamed.get(name, name) for name in stored}
    assert new <= set(record.added) | {"d2t", "t2d"}
    count = draft.config.draft_vocab_size
    kept = KEPT if count == DRAFT_VOCAB else torch.arange(VOCAB)
    assert torch.equal(draft.draft_to_target(torch.arange(count)), kept)
    assert draft.t2d.nonzero().flatten().equal(kept)
    # It runs, and the result is no NaN from a table left on the meta device.
    features = torch.randn(1, 5, draft.feature_size)
    out = draft(features, inputs_embeds=torch.randn(1, 5, HIDDEN))
    assert out.logits.shape == (1, 5, count)
    assert out.logits.isfinite().all()
    assert not any(tensor.is_meta for tensor in [*draft.parameters(), *draft.buffers()])


def test_computes_what_the_own_layout_computes(fixture: Fixture, tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(fixture.write(tmp_path / "published"))
    draft.save_pretrained(tmp_path / "own")
    own = Eagle3DraftModel.from_pretrained(tmp_path / "own")
    assert own.provenance.family == "transformers"
    features, embeds = torch.randn(1, 5, draft.feature_size), torch.randn(1, 5, HIDDEN)
    for recurrent in (False, True):
        given = {"hidden_states": embeds if recurrent else features, "recurrent": recurrent}
        mine, theirs = (model(inputs_embeds=embeds, **given) for model in (draft, own))
        assert torch.equal(mine.logits, theirs.logits)
        assert torch.equal(mine.last_hidden_state, theirs.last_hidden_state)


def test_names_on_record(tmp_path: Path):
    record = Eagle3DraftModel.from_pretrained(FIXTURES["eagle-sharded-bin-extras"].write(tmp_path)).provenance
    assert record.renamed["midlayer.hidden_norm.weight"] == "layers.0.hidden_norm.weight"
    assert set(record.dropped) == {"midlayer.self_attn.rotary_emb.inv_freq", "verifier_norm.weight"}
    assert record.files == ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    labels = {label for label, _ in record.rows()}
    assert {"family", "aux hidden states", "renamed", "dropped"} <= labels
    json.dumps(record.as_dict())


def test_weights_win_over_config_and_both_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    changes = {"intermediate_size": 99, "num_key_value_heads": 4, "draft_vocab_size": 30, "attention_bias": True}
    folder = FIXTURES["eagle"].write(tmp_path, **changes)
    with caplog.at_level(logging.WARNING):
        draft = Eagle3DraftModel.from_pretrained(folder)
    found = {entry.name: (entry.config, entry.weights) for entry in draft.provenance.overridden}
    assert found["intermediate_size"] == (99, 24)
    assert found["num_key_value_heads"] == (4, 2)
    assert found["attention_bias"] == (True, False)
    assert "intermediate_size: config says 99, weights say 24" in caplog.text
    assert "draft_vocab_size: config says 30, weights say 12" in caplog.text


def test_matching_config_is_no_conflict(tmp_path: Path):
    assert Eagle3DraftModel.from_pretrained(FIXTURES["eagle"].write(tmp_path)).provenance.overridden == []


def test_missing_theta_is_10000_whatever_the_target(tmp_path: Path):
    config = llama(**EAGLE)
    del config["rope_theta"]
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, config, mapped()()))
    assert draft.config.rope_parameters["rope_theta"] == 10000.0
    assert any("rope_theta" in text for text in draft.provenance.warnings)


def test_theta_in_rope_parameters_only(tmp_path: Path):
    config = llama(**EAGLE) | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    del config["rope_theta"]
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, config, mapped()()))
    assert draft.config.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}
    assert not any("rope_theta" in text for text in draft.provenance.warnings)


def test_speculators_defaults_of_a_shortened_config(tmp_path: Path):
    # Only what differs from Qwen3Config's defaults is saved there: 32 heads of 128 stay unsaid.
    layer = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "model_type": "llama"}
    with pytest.raises(ValueError, match="num_attention_heads 32"):
        Eagle3DraftModel.from_pretrained(write(tmp_path, speculators(layer), mapped(first="layers.0")()))


def test_speculators_missing_norm_before_residual_is_false_with_a_warning(tmp_path: Path):
    config = speculators()
    del config["norm_before_residual"]
    draft = Eagle3DraftModel.from_pretrained(write(tmp_path, config, mapped(first="layers.0")()))
    assert draft.config.norm_before_residual is False
    assert any("norm_before_residual is missing" in text for text in draft.provenance.warnings)


def test_speculators_tells_how_many_tokens_to_draft(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["speculators"].write(tmp_path))
    assert draft.generation_config.num_assistant_tokens == 3
    assert draft.config.target_name_or_path == "acme/Target"


def test_head_of_the_target(tmp_path: Path):
    tensors = base_tensors(draft_vocab=VOCAB)
    del tensors["lm_head.weight"]
    folder = write(tmp_path, modelopt(), tensors)
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing.*Pass target="):
        Eagle3DraftModel.from_pretrained(folder)
    model = target()
    draft = Eagle3DraftModel.from_pretrained(folder, target=model)
    assert torch.equal(draft.lm_head.weight, model.get_output_embeddings().weight)
    assert "lm_head.weight" in draft.provenance.added


def test_target_gives_the_depth_that_decides_the_convention(tmp_path: Path):
    folder = write(tmp_path, modelopt({AUX: [3, 6, 8]}), base_tensors(draft_vocab=VOCAB))
    unknown = Eagle3DraftModel.from_pretrained(folder)
    assert unknown.config.aux_hidden_state_layers == [4, 7, 9]
    assert "unless the target has 8 layers" in str(unknown.provenance.aux)
    with pytest.raises(ValueError, match=r"aux layer ids \[9\] are outside 0..8"):
        check_draft_fits(target(), unknown)
    known = Eagle3DraftModel.from_pretrained(folder, target=target())
    assert known.config.aux_hidden_state_layers == [3, 6, 8]
    assert known.config.target_num_hidden_layers == LAYERS


def test_caller_wins(tmp_path: Path):
    folder = FIXTURES["modelopt"].write(tmp_path)
    draft = Eagle3DraftModel.from_pretrained(folder, aux_hidden_state_layers=[1, 2, 3], norm_before_residual=True)
    assert draft.config.aux_hidden_state_layers == [1, 2, 3]
    assert draft.config.norm_before_residual is True
    assert draft.provenance.aux.source == "caller"


def test_dtype(tmp_path: Path):
    tensors = {name: t.half() if t.is_floating_point() else t for name, t in mapped()().items()}
    folder = write(tmp_path, llama(**EAGLE), tensors, "bin")
    assert Eagle3DraftModel.from_pretrained(folder, dtype="auto").dtype == torch.float16
    draft = Eagle3DraftModel.from_pretrained(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert draft.d2t.dtype == torch.int64


def test_unknown_keyword_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="variant"):
        Eagle3DraftModel.from_pretrained(FIXTURES["eagle"].write(tmp_path), variant="fp16")


def test_subfolder(tmp_path: Path):
    FIXTURES["specforge"].write(tmp_path / "inner")
    draft = Eagle3DraftModel.from_pretrained(tmp_path, subfolder="inner")
    assert draft.provenance.family == "specforge"


@pytest.mark.parametrize("name", ["eagle", "specforge-ids"])
def test_offline_cache_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--acme--draft"
    FIXTURES[name].write(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(revision)
    draft = Eagle3DraftModel.from_pretrained("acme/draft", cache_dir=tmp_path, revision="v1", local_files_only=True)
    assert draft.provenance.source == "acme/draft"
    with pytest.raises(OSError, match="acme/other"):
        Eagle3DraftModel.from_pretrained("acme/other", cache_dir=tmp_path, local_files_only=True)


def test_side_file_with_the_map(tmp_path: Path):
    folder = write(tmp_path, FIXTURES["automodel"].config, base_tensors(first="layers.0"))
    torch.save(vocabulary_map(), folder / "eagle_meta.pt")
    draft = Eagle3DraftModel.from_pretrained(folder)
    assert torch.equal(draft.draft_to_target(torch.arange(DRAFT_VOCAB)), KEPT)
    assert "eagle_meta.pt" in draft.provenance.files


def plain(vocab: int, draft_vocab: int, **changes) -> Eagle3DraftModel:
    """A draft for a target of `vocab` tokens, its last target id 38 or the last there is."""
    torch.manual_seed(1)
    draft = Eagle3DraftModel(
        Eagle3Config(
            vocab_size=vocab, draft_vocab_size=draft_vocab, hidden_size=HIDDEN, intermediate_size=24,
            num_attention_heads=4, num_key_value_heads=2, **changes,
        )
    )  # fmt: skip
    if draft_vocab < vocab:
        draft.set_draft_vocabulary(KEPT)
    return draft


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("size", [VOCAB - 1, VOCAB + 24])
def test_target_with_other_padding(size: int, own: bool, tmp_path: Path):
    plain(VOCAB, DRAFT_VOCAB, own_embeddings=own).save_pretrained(tmp_path)
    model = target(size)
    unfitted = Eagle3DraftModel.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"vocabulary {VOCAB}, the target's vocabulary is {size}"):
        check_draft_fits(model, unfitted)
    draft = Eagle3DraftModel.from_pretrained(tmp_path, target=model)
    check_draft_fits(model, draft)
    assert torch.equal(draft.draft_to_target(torch.arange(DRAFT_VOCAB)), KEPT)
    assert draft.t2d.shape == (size,)
    assert draft.t2d.nonzero().flatten().equal(KEPT)
    if own:
        assert draft.embed_tokens.weight.shape[0] == size
        kept = min(size, VOCAB)
        assert torch.equal(draft.embed_tokens.weight[:kept], unfitted.embed_tokens.weight[:kept])
        assert not draft.embed_tokens.weight[VOCAB:].any()
    assert any("fitted to the target" in text for text in draft.provenance.warnings)
    ids = torch.tensor([[5, 6, 7]])
    plainly = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(model.generate(input_ids=ids, assistant_model=draft, max_new_tokens=8, do_sample=False), plainly)


def test_full_head_with_other_padding(tmp_path: Path):
    draft = plain(VOCAB, VOCAB)
    assert fit_target_vocabulary(draft, VOCAB) == []
    before = draft.lm_head.weight.clone()
    fit_target_vocabulary(draft, VOCAB - 3)
    assert torch.equal(draft.lm_head.weight, before[: VOCAB - 3])
    assert draft.config.draft_vocab_size == draft.config.vocab_size == VOCAB - 3
    draft.save_pretrained(tmp_path)
    assert torch.equal(Eagle3DraftModel.from_pretrained(tmp_path).lm_head.weight, draft.lm_head.weight)


def test_vocabularies_that_are_not_the_same():
    with pytest.raises(ValueError, match="40 tokens, the target has 4000: not the same tokenizer"):
        fit_target_vocabulary(plain(VOCAB, DRAFT_VOCAB), 4000)
    with pytest.raises(ValueError, match="has token 38, the target only 38 tokens"):
        fit_target_vocabulary(plain(VOCAB, DRAFT_VOCAB), 38)
