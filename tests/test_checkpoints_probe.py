"""The probe: a draft that is read wrong gets a verdict that names the cause."""

from __future__ import annotations

import copy

import pytest
import torch
from support import make_draft, make_target

from eagle3_hf.checkpoints.probe import probe_draft
from eagle3_hf.training.objective import training_time_test

IDS = [2, 4, 6]
NEW = 30


@pytest.fixture(scope="module")
def target():
    return make_target("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def texts():
    return [torch.randint(3, 16, (1, 8), generator=torch.Generator().manual_seed(100 + i)) for i in range(5)]


@pytest.fixture(scope="module", params=[False, True], ids=["pre-norm", "post-norm"])
def trained(request, target, texts):
    """A draft that has learnt the target's answers to `texts` by heart, two tokens deep."""
    full = torch.cat([target.generate(text, max_new_tokens=NEW, do_sample=False) for text in texts])
    with torch.no_grad(), target.capture_aux_hidden_states(IDS) as capture:
        logits = target(input_ids=full).logits
    batch = {
        "features": torch.cat(capture.take(), dim=-1),
        "embeddings": target.get_input_embeddings()(full).detach(),
        "input_ids": full,
        "loss_mask": torch.ones_like(full, dtype=torch.bool),
        "teacher_logits": 20.0 * torch.nn.functional.one_hot(logits.argmax(dim=-1), 16),
        "teacher_argmax": logits.argmax(dim=-1),
    }
    draft = make_draft(
        target, aux_hidden_state_layers=IDS, draft_vocab_size=16, initializer_range=0.1, norm_output=request.param
    )
    optimizer = torch.optim.Adam(draft.parameters(), 5e-3)
    for _ in range(80):
        loss = training_time_test(draft, **batch, steps=2, step_weights=[1.0, 1.0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft


def test_right_reading(trained, target, texts):
    verdict = probe_draft(target, trained, texts, NEW)
    assert verdict.as_loaded_is_right, verdict
    assert "read right" in verdict.text
    loaded = verdict.readings[0]
    assert loaded.first > 0.9
    assert loaded.second > 0.8
    assert loaded.places == 5 * NEW
    assert {reading.ids[0] for reading in verdict.readings} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("offset", [-1, 1])
def test_ids_off_by_one(offset, trained, target, texts):
    wrong = copy.deepcopy(trained)
    wrong.config.aux_hidden_state_layers = [i + offset for i in IDS]
    verdict = probe_draft(target, wrong, texts, NEW)
    assert verdict.best == f"aux ids {-offset:+d}"
    assert verdict.text.startswith("the aux ids are off")
    assert "aux_hidden_state_layers=[2, 4, 6]" in verdict.text


def test_norm_before_residual(trained, target, texts):
    wrong = copy.deepcopy(trained)
    wrong.config.norm_before_residual = True
    wrong.layers[0].norm_before_residual = True
    verdict = probe_draft(target, wrong, texts, NEW)
    assert verdict.text.startswith("norm_before_residual is read wrong")
    assert "norm_before_residual=False" in verdict.text
    # The draft is left as it was.
    assert wrong.config.norm_before_residual is True
    assert wrong.layers[0].norm_before_residual is True


def test_norm_output(trained, target, texts):
    wrong = copy.deepcopy(trained)
    right = trained.config.norm_output
    wrong.config.norm_output = not right
    verdict = probe_draft(target, wrong, texts, NEW)
    assert verdict.text.startswith("norm_output is read wrong")
    assert f"norm_output={right}" in verdict.text


def test_vocabulary_of_another_head(trained, target, texts):
    wrong = copy.deepcopy(trained)
    wrong.d2t.copy_(torch.arange(16).roll(5) - torch.arange(16))
    verdict = probe_draft(target, wrong, texts, NEW)
    assert verdict.best == "none"
    assert "vocabulary map" in verdict.text


def test_no_prompt(trained, target):
    with pytest.raises(ValueError, match="at least one prompt"):
        probe_draft(target, trained, [])
