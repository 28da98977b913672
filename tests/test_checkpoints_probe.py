"""The probe: a draft that is read wrong gets a verdict that names the cause."""

from __future__ import annotations

import copy

import pytest
import torch
from scipy import stats
from support import make_draft, make_target
from transformers import DynamicCache

from eagle3_hf.checkpoints.probe import _continue, _second_step, probe_draft
from eagle3_hf.checkpoints.verdict import Reading, judge, signed_rank
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


def test_ids_and_norms_wrong_at_once(trained, target, texts):
    wrong = copy.deepcopy(trained)
    wrong.config.aux_hidden_state_layers = [i + 1 for i in IDS]
    wrong.config.norm_before_residual = wrong.layers[0].norm_before_residual = True
    verdict = probe_draft(target, wrong, texts, NEW)
    assert verdict.best == "aux ids -1, norm_before_residual off", verdict
    assert verdict.text.startswith("the aux ids are off and norm_before_residual is read wrong")
    assert verdict.text.endswith("Load it with aux_hidden_state_layers=[2, 4, 6], norm_before_residual=False")


def test_second_step_is_the_recurrent_step(trained, target, texts):
    (text,) = [_continue(target, texts[0], set(IDS), 8)]
    features = torch.cat([text.states[i] for i in IDS], dim=-1)
    cache = DynamicCache()
    with torch.no_grad():
        out = trained(features[:, :-1], inputs_embeds=text.embeds[:, 1:], cache=cache)
        places = torch.tensor([3, 7, 9])
        found = _second_step(trained, out.last_hidden_state, text.embeds, places, cache)
        for place, logits in zip(places.tolist(), found):
            cache = DynamicCache()
            first = trained(features[:, : place + 1], inputs_embeds=text.embeds[:, 1 : place + 2], cache=cache)
            state, embed = first.last_hidden_state[:, -1:], text.embeds[:, place + 2 : place + 3]
            alone = trained(state, inputs_embeds=embed, cache=cache, recurrent=True).logits[0, 0]
            torch.testing.assert_close(logits, alone)


def test_stops_when_it_is_certain(trained, target, texts):
    assert probe_draft(target, trained, texts, NEW, enough=4).readings[0].places == 4 * NEW
    undecided = probe_draft(target, trained, texts, 6, enough=1)
    assert undecided.readings[0].places == 5 * 6


def test_little_text_is_said(trained, target, texts):
    verdict = probe_draft(target, trained, texts[:1], 4)
    assert verdict.as_loaded_is_right
    assert not verdict.certain
    assert "That isn't certain" in verdict.text


def reading(name: str, log_probs: torch.Tensor) -> Reading:
    return Reading(name, (1,), {}, 0.5, 0.5, len(log_probs), 0, float(log_probs.mean()), log_probs, log_probs[:0])


def test_signed_rank_agrees_with_scipy():
    gains = torch.randn(60, generator=torch.Generator().manual_seed(0), dtype=torch.double) + 0.3
    gains[5], gains[6], gains[7] = 0.0, gains[8].abs(), float("nan")  # a zero, a tie, a missing one
    kept = gains[~gains.isnan()].numpy()
    found = stats.wilcoxon(kept, zero_method="wilcox", correction=False, method="asymptotic", alternative="greater")
    assert signed_rank(gains) == pytest.approx(float(found.zstatistic), abs=0.02)
    assert signed_rank(-gains) == pytest.approx(-signed_rank(gains))
    assert signed_rank(torch.zeros(5)) == 0.0


def test_a_small_steady_gain_is_found_and_chance_is_not():
    generator = torch.Generator().manual_seed(1)
    base = torch.randn(700, generator=generator, dtype=torch.double)
    noise = 0.5 * torch.randn(700, generator=generator, dtype=torch.double)
    steady = judge([reading("as loaded", base), reading("other", base + noise + 0.1)])
    assert steady.best == "other"
    chance = judge([reading("as loaded", base), reading("other", base + noise)])
    assert chance.as_loaded_is_right
    assert not chance.certain
    clear = judge([reading("as loaded", base + 0.3), reading("other", base + noise)])
    assert clear.as_loaded_is_right
    assert clear.certain


def test_a_few_wild_values_do_not_decide():
    base = torch.zeros(400, dtype=torch.double)
    other = base + 0.1 * torch.randn(400, generator=torch.Generator().manual_seed(2), dtype=torch.double) - 0.05
    other[:3] = 1000.0
    assert judge([reading("as loaded", base), reading("other", other)]).as_loaded_is_right
