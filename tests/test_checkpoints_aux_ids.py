"""Aux ids: which tensors each publisher's numbers mean."""

from __future__ import annotations

import pytest

from eagle3_hf.checkpoints.aux_ids import resolve_aux_ids

TOP = "eagle_aux_hidden_state_layer_ids"


def nested(*ids: int) -> dict:
    return {"eagle_config": {TOP: list(ids)}}


@pytest.mark.parametrize(
    ("config", "layers", "expected", "source"),
    [
        ({TOP: [2, 16, 29]}, 32, (2, 16, 29), TOP),  # speculators, vLLM: inputs
        (nested(1, 15, 28), 32, (2, 16, 29), f"eagle_config.{TOP}"),  # SpecForge, ModelOpt: outputs
        (nested(1, 17, 33), 36, (2, 18, 34), f"eagle_config.{TOP}"),  # SpecForge gpt-oss-120b
        (nested(1, 11, 21), 24, (2, 12, 22), f"eagle_config.{TOP}"),  # SpecForge gpt-oss-20b
        (nested(24, 30, 36), 36, (24, 30, 36), f"eagle_config.{TOP}"),  # NVIDIA gpt-oss v3: boundaries
        (nested(2, 30, 58), 61, (2, 30, 58), f"eagle_config.{TOP}"),  # Kimi: boundaries, known by the leading 2
        ({"aux_hidden_states_layer_ids": [1, 17, 32]}, 36, (2, 18, 33), "aux_hidden_states_layer_ids"),
        ({"eagle_config": {}}, 32, None, "default"),
        ({}, None, None, "default"),
    ],
)
def test_conventions(config, layers, expected, source):
    made, warnings = resolve_aux_ids(config, 3, layers)
    assert made.ids == expected
    assert made.source == source
    assert not warnings
    assert str(made)


def test_caller_wins():
    made, _ = resolve_aux_ids(nested(1, 15, 28), 3, 32, override=[5, 6, 7])
    assert made.ids == (5, 6, 7)
    assert made.source == "caller"


def test_both_places_that_agree_and_that_do_not():
    agree = {TOP: [2, 16, 29]} | nested(1, 15, 28)
    assert resolve_aux_ids(agree, 3, 32)[1] == []
    made, warnings = resolve_aux_ids({TOP: [1, 15, 28]} | nested(1, 15, 28), 3, 32)
    assert made.ids == (1, 15, 28)
    assert "name different states" in warnings[0]


def test_depth_unknown_is_said():
    made, warnings = resolve_aux_ids(nested(24, 30, 36), 3, None)
    assert made.ids == (25, 31, 37)
    assert warnings == []
    assert "unless the target has 36 layers, then pass target=" in made.convention


def test_order_is_low_to_high():
    made, warnings = resolve_aux_ids({TOP: [29, 2, 16]}, 3, 32)
    assert made.ids == (2, 16, 29)
    assert "ascending" in warnings[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({TOP: [2, 16]}, "gives 2 aux ids .* fc reads 3"),
        ({TOP: [2, 2, 16]}, "repeats"),
        ({TOP: [2, 16, 40]}, "outside 0..32"),
        ({TOP: "2,16,29"}, "list of whole numbers"),
    ],
)
def test_errors(config, message):
    with pytest.raises(ValueError, match=message):
        resolve_aux_ids(config, 3, 32)


def test_other_count_without_ids():
    with pytest.raises(ValueError, match="reads 5 aux hidden states and its config doesn't say which"):
        resolve_aux_ids({}, 5, 32)
