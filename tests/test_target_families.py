"""The checklist of docs/adding-a-target.md, for every registered family: capture, export of the class, same output.

Families are registered in `src/eagle3_hf/families.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import CHAIN, DYNAMIC, assert_same_as_plain, make_draft, prompts, texts_of
from transformers import AutoModelForCausalLM

from eagle3_hf import AutoEagle3Target, disable_eagle3, enable_eagle3
from eagle3_hf.aux_layers import check_aux_layers, default_aux_layers, find_decoder
from eagle3_hf.families import FAMILIES, TINY_LAYERS, TINY_VOCAB, family_of

LAYERS = TINY_LAYERS


@pytest.fixture(scope="module", params=FAMILIES)
def target(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    made = AutoEagle3Target.from_config(FAMILIES[request.param].tiny_config(), attn_implementation="eager")
    made.generation_config.eos_token_id = None
    return made


def test_at_least_sixteen_and_documented():
    assert len(FAMILIES) >= 16
    page = (Path(__file__).parents[1] / "docs" / "adding-a-target.md").read_text()
    assert [name for name in FAMILIES if f"`{name}`" not in page] == []


def test_registry_is_true(target: Any):
    family = family_of(target.config)
    assert family is FAMILIES[target.config.get_text_config().model_type]
    place = target
    for name in family.layers.split("."):
        place = getattr(place, name)
    assert place is find_decoder(target)[0]
    assert family.default_aux_layers(LAYERS) == target.get_eagle3_aux_hidden_state_layers()
    for layers, ids in family.aux_layers.items():
        assert check_aux_layers(ids, layers) == tuple(sorted(ids)) != default_aux_layers(layers)


def test_aux_states_are_the_layer_inputs(target: Any):
    inputs = prompts(2, 12, ragged=False)
    ids = list(range(LAYERS + 1))
    with torch.no_grad():
        expected = target(**inputs, output_hidden_states=True, use_cache=False).hidden_states
        with target.capture_aux_hidden_states(ids) as capture:
            target(**inputs, use_cache=False)
        states = capture.take()
    assert len(expected) == LAYERS + 1
    for i in range(LAYERS):
        assert torch.equal(states[i], expected[i]), i
        assert i == 0 or not torch.equal(states[i], states[i - 1])
    # Id L is the input of the final norm; hidden_states[L] is its output.
    norm = find_decoder(target)[1]
    assert norm is not None
    torch.testing.assert_close(norm(states[LAYERS]), expected[LAYERS])
    assert not torch.allclose(states[LAYERS], expected[LAYERS])


@pytest.mark.parametrize("shape", [CHAIN, DYNAMIC], ids=["chain", "tree"])
def test_greedy_output_is_the_same(shape: dict[str, Any], target: Any):
    draft = make_draft(target, aux_hidden_state_layers=list(default_aux_layers(LAYERS)))
    # Longer than the window and the chunk of the families that have one.
    stats = assert_same_as_plain(target, draft, prompts(2, 10), shape, max_new_tokens=20)
    assert stats.accepted > 0


def test_sampled_output_ends_in_time(target: Any):
    draft = make_draft(target, aux_hidden_state_layers=list(default_aux_layers(LAYERS)))
    inputs = prompts(1, 6)
    torch.manual_seed(0)
    out = target.generate(**inputs, assistant_model=draft, do_sample=True, max_new_tokens=7)
    assert [len(text) for text in texts_of(out, inputs)] == [13]
    assert int(out.max()) < TINY_VOCAB


def test_saves_as_its_own_class_and_can_be_undone(target: Any, tmp_path: Path):
    original = target._eagle3_original_class
    target.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(again) is original
    assert type(disable_eagle3(target)) is original
    assert enable_eagle3(target) is target
