"""Drafts without `fc`, which read the target's last state as it is (NVIDIA's short-context gpt-oss heads)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fixtures import AUX, FIXTURES, VOCAB, base_tensors, modelopt, write
from support import CHAIN, DYNAMIC, FAMILIES, assert_same_as_plain, make_draft, make_target, prompts

from eagle3_hf import Eagle3Config, Eagle3DraftModel
from eagle3_hf.aux_layers import FINAL_STATE, check_aux_layers
from eagle3_hf.checkpoints import export_draft
from eagle3_hf.checkpoints.padding import pad_draft, pad_segments
from eagle3_hf.checkpoints.probe import probe_draft
from eagle3_hf.neuron.families import take_apart
from eagle3_hf.target import check_draft_fits
from eagle3_hf.training.objective import training_time_test


def single(target: Any, **changes: Any) -> Eagle3DraftModel:
    return make_draft(target, **({"use_aux_hidden_state": False, "aux_hidden_state_layers": None} | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_final_state_is_what_the_head_reads(family: str):
    target, inputs = make_target(family), prompts(2, 9, ragged=False)
    with torch.no_grad():
        with target.capture_aux_hidden_states([FINAL_STATE]) as capture:
            out = target(**inputs, output_hidden_states=True, use_cache=False)
        (state,) = capture.take()
        with target.capture_aux_hidden_states([4]) as capture:
            target(**inputs, use_cache=False)
    assert torch.equal(state, out.hidden_states[-1])
    assert not torch.allclose(state, capture.take()[0])


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_same(family: str, shape: dict[str, Any]):
    target = make_target(family)
    stats = assert_same_as_plain(target, single(target), prompts(3, 10), shape)
    assert stats.accepted > 0


def test_generation_feeds_it_that_state():
    target = make_target("llama")
    draft, inputs = single(target, draft_vocab_size=16), prompts(1, 9)
    seen = []
    draft.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    fused = []
    original = draft.fuse
    draft.fuse = lambda features: fused.append(features) or original(features)  # type: ignore[method-assign]
    target.generate(**inputs, assistant_model=draft, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        states = target(**inputs, output_hidden_states=True).hidden_states[-1]
    width = min(fused[0].shape[1], states.shape[1])
    torch.testing.assert_close(fused[0][:, :width], states[:, :width])


def test_loads_without_fc_and_says_what_it_reads(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["modelopt-no-aux"].write(tmp_path))
    assert not [name for name in draft.state_dict() if name.startswith("fc")]
    features = torch.randn(1, 4, 16)
    assert draft.fuse(features) is features
    assert "the output of the target's final norm" in str(draft.provenance.aux)
    target = make_target("llama", vocab_size=VOCAB, hidden_size=16)
    assert check_draft_fits(target, draft) == (FINAL_STATE,)


def test_missing_hidden_norm_is_ones_and_on_record(tmp_path: Path):
    draft = Eagle3DraftModel.from_pretrained(FIXTURES["modelopt-no-aux-no-hidden-norm"].write(tmp_path))
    assert draft.layers[0].hidden_norm.weight.eq(1).all()
    assert "layers.0.hidden_norm.weight" in draft.provenance.added
    assert any("hidden_norm.weight is missing" in text for text in draft.provenance.warnings)


def test_other_missing_and_renamed_tensors_are_errors(tmp_path: Path):
    tensors = base_tensors(draft_vocab=VOCAB)
    del tensors["fc.weight"]
    config = modelopt({"use_aux_hidden_state": False, AUX: []})
    tensors["midlayer.old_norm.weight"] = tensors.pop("midlayer.hidden_norm.weight")
    with pytest.raises(ValueError, match=r"unknown: layers\.0\.old_norm\.weight"):
        Eagle3DraftModel.from_pretrained(write(tmp_path / "renamed", config, tensors))
    tensors["midlayer.input_layernorm.old"] = tensors.pop("midlayer.input_layernorm.weight")
    with pytest.raises(ValueError, match=r"missing: layers\.0\.input_layernorm\.weight"):
        Eagle3DraftModel.from_pretrained(write(tmp_path / "missing", config, tensors))


def test_without_the_key_a_missing_fc_is_an_error(tmp_path: Path):
    tensors = base_tensors(draft_vocab=VOCAB)
    del tensors["fc.weight"]
    with pytest.raises(ValueError, match=r"no fc\.weight"):
        Eagle3DraftModel.from_pretrained(write(tmp_path, modelopt(), tensors))


def test_another_state_can_be_named(tmp_path: Path):
    folder = FIXTURES["modelopt-no-aux"].write(tmp_path / "in")
    draft = Eagle3DraftModel.from_pretrained(folder, aux_hidden_state_layers=[4])
    assert check_draft_fits(make_target("llama", vocab_size=VOCAB, hidden_size=16), draft) == (4,)
    draft.save_pretrained(tmp_path / "own")
    assert Eagle3DraftModel.from_pretrained(tmp_path / "own").config.aux_hidden_state_layers == [4]
    with pytest.raises(ValueError, match="feed a head without fc from the target's last state only"):
        export_draft(draft, tmp_path / "out", "specforge")
    with pytest.raises(ValueError, match=r"gives 2 aux ids \[1, 2\], but the draft reads one state"):
        Eagle3DraftModel.from_pretrained(folder, aux_hidden_state_layers=[1, 2])


def test_training_objective():
    target = make_target("llama")
    draft = single(target, draft_vocab_size=16, initializer_range=0.1)
    full = target.generate(**prompts(2, 8, ragged=False), max_new_tokens=16, do_sample=False)
    with torch.no_grad(), target.capture_aux_hidden_states(check_draft_fits(target, draft)) as capture:
        logits = target(input_ids=full).logits
    batch = {
        "features": torch.cat(capture.take(), dim=-1),
        "embeddings": target.get_input_embeddings()(full).detach(),
        "input_ids": full,
        "loss_mask": torch.ones_like(full, dtype=torch.bool),
        "teacher_logits": 20.0 * torch.nn.functional.one_hot(logits.argmax(dim=-1), 16),
    }
    optimizer = torch.optim.Adam(draft.parameters(), 1e-2)
    losses = []
    for _ in range(25):
        loss = training_time_test(draft, **batch, steps=2).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_padding_computes_the_same():
    target = make_target("llama")
    draft = single(target)
    wide = pad_draft(draft, 40)
    features, embeds = torch.randn(1, 5, 32), torch.randn(1, 5, 32)
    plain = draft(features, inputs_embeds=embeds)
    padded = wide(pad_segments(features, 2, 1, 40), inputs_embeds=pad_segments(embeds, 2, 1, 40))
    torch.testing.assert_close(padded.logits, plain.logits)


def test_probe_tries_other_states():
    target = make_target("llama")
    draft = single(target, draft_vocab_size=16)
    verdict = probe_draft(target, draft, [prompts(1, 8)["input_ids"]], 8)
    assert [reading.ids for reading in verdict.readings][:3] == [(FINAL_STATE,), (4,), (3,)]
    assert verdict.readings[0].name == "as loaded"


def test_configurations_that_contradict_it():
    with pytest.raises(ValueError, match=r"fc_norm: a draft with use_aux_hidden_state=False has no fc"):
        Eagle3Config(use_aux_hidden_state=False, fc_norm=True)
    with pytest.raises(ValueError, match="reads one target state"):
        Eagle3Config(use_aux_hidden_state=False, aux_hidden_state_layers=[1, 2])
    with pytest.raises(ValueError, match="hidden_size 4096 must be"):
        Eagle3Config(use_aux_hidden_state=False, target_hidden_size=5120, own_embeddings=True)
    with pytest.raises(ValueError, match=r"only alone"):
        check_aux_layers([FINAL_STATE, 3], 8)


def test_not_on_neuron():
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"without fc .* aren't supported on Neuron"):
        take_apart(target, single(target))
