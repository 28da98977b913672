"""Values that read as something else than they say, weights that do nothing, drafts of another target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import (
    AUX,
    DRAFT_VOCAB,
    EAGLE,
    FIXTURES,
    HIDDEN,
    LAYERS,
    SPECFORGE,
    VOCAB,
    base_tensors,
    llama,
    mapped,
    modelopt,
    speculators,
    write,
)
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_hf import Eagle3Config, Eagle3DraftModel
from eagle3_hf.checkpoints import export_draft

load = Eagle3DraftModel.from_pretrained


def target(hidden: int = HIDDEN, layers: int = LAYERS) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=hidden, intermediate_size=8, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=2,
        )
    )  # fmt: skip


def own(folder: Path, change=None, **config) -> Path:
    """A draft in our own layout, its tensors put through `change`, its config through `config`."""
    load(FIXTURES["eagle"].write(folder / "published")).save_pretrained(folder / "own")
    if change is not None:
        tensors = load_file(folder / "own/model.safetensors")
        change(tensors)
        save_file(tensors, folder / "own/model.safetensors", {"format": "pt"})
    file = folder / "own/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder / "own"


BAD_VALUES = {
    "norm_before_residual": ("false", "norm_before_residual must be true or false, got 'false'"),
    "norm_output": (2, "norm_output must be true or false, got 2"),
    "rms_norm_eps": (-1e-5, "rms_norm_eps must be a number of at least 0"),
    "rope_theta": (0, "rope_theta must be above 0"),
    "rope_scaling": ({"factor": 8.0}, "a factor .8.0. and no type"),
    "hidden_act": (["silu"], "hidden_act must be a name|isn't known"),
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_bad_values_are_refused_in_both_kinds_of_config(key, tmp_path):
    value, message = BAD_VALUES[key]
    folder = write(tmp_path / "published", llama(**SPECFORGE, **{key: value}), mapped()())
    with pytest.raises(ValueError, match=message):
        load(folder)
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_hidden_size", "16"), ("sliding_window", [4]), ("draft_vocab_size", 1.5), ("logit_scale", 0),
     ("logit_scale", "2"), ("architectures", "LlamaForCausalLMEagle3"), ("quantization_config", "fp8"),
     ("eagle_config", [1]), ("num_hidden_layers", True), ("rms_norm_eps", []), ("rope_theta", "big")],
)  # fmt: skip
def test_values_of_another_kind_are_named(key, value, tmp_path):
    folder = write(tmp_path / "a", llama(**SPECFORGE) | {key: value}, mapped()())
    with pytest.raises(ValueError, match=f"{key}.* (must be|got)"):
        load(folder)


@pytest.mark.parametrize("part", [[], {"proposal_methods": ["greedy"]}, {"verifier": "acme/Target"}])
def test_odd_speculators_config_is_named(part, tmp_path):
    folder = write(tmp_path / "a", speculators(speculators_config=part or ["x"]), mapped(first="layers.0")())
    with pytest.raises(ValueError, match=r"speculators_config.* must be"):
        load(folder)


@pytest.mark.parametrize(("flag", "tensor"), [("fc_norm", r"fc_norm\.\*"), ("norm_before_fc", "input_norm")])
def test_norm_that_the_config_promises_and_the_file_lacks_is_an_error(flag, tensor, tmp_path):
    nested = write(tmp_path / "nested", modelopt({flag: True}), base_tensors(draft_vocab=VOCAB))
    flat = write(tmp_path / "flat", llama(**SPECFORGE, **{flag: True}), mapped()())
    for folder in (nested, flat):
        with pytest.raises(ValueError, match=f"{flag} is true in the config, but {tensor}.* is missing"):
            load(folder)


def test_layers_of_a_kind_with_norms_that_the_file_lacks(tmp_path):
    config = speculators(llama(model_type="qwen3"))
    with pytest.raises(ValueError, match=r"type qwen3.*q_norm.weight is missing"):
        load(write(tmp_path / "a", config, mapped(first="layers.0", embed=True)()))
    assert load(write(tmp_path / "b", config, mapped(first="layers.0", embed=True, qk_norm=True)())).config.qk_norm


@pytest.mark.parametrize("t2d", [True, False])
def test_map_that_was_never_filled_in(t2d, tmp_path, caplog):
    tensors = mapped()()
    if not t2d:
        del tensors["t2d"]
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.long)
    folder = write(tmp_path / "a", llama(**EAGLE), tensors)
    if t2d:
        with pytest.raises(ValueError, match=r"d2t is all zeros.*never filled in"):
            load(folder)
    else:
        load(folder)
        assert "d2t is all zeros" in caplog.text


def test_map_of_zeros_that_t2d_confirms_is_a_vocabulary(tmp_path, caplog):
    tensors = mapped()()
    tensors["d2t"] = torch.zeros(DRAFT_VOCAB, dtype=torch.long)
    tensors["t2d"] = torch.arange(VOCAB) < DRAFT_VOCAB
    draft = load(write(tmp_path / "a", llama(**EAGLE), tensors))
    assert draft.draft_to_target(torch.arange(DRAFT_VOCAB)).tolist() == list(range(DRAFT_VOCAB))
    assert "all zeros" not in caplog.text


def test_own_layout_map_that_was_never_filled_in(tmp_path):
    with pytest.raises(ValueError, match=r"d2t is all zeros.*never filled in"):
        load(own(tmp_path, lambda tensors: tensors["d2t"].zero_()))


@pytest.mark.parametrize("name", ["norm.weight", "lm_head.weight", "fc.weight", "midlayer.hidden_norm.weight"])
def test_weights_of_zeros_are_named(name, tmp_path):
    tensors = mapped()()
    tensors[name].zero_()
    with pytest.raises(ValueError, match=f"all zero: {name}"):
        load(write(tmp_path / "a", llama(**SPECFORGE), tensors))
    if name in {"norm.weight", "fc.weight"}:
        with pytest.raises(ValueError, match=f"all zero: {name}"):
            load(own(tmp_path, lambda tensors: tensors[name].zero_()))


def test_block_of_zeros_beside_a_residual_is_a_warning(tmp_path, caplog):
    tensors = mapped()()
    tensors["midlayer.mlp.down_proj.weight"].zero_()
    draft = load(write(tmp_path / "a", llama(**SPECFORGE), tensors))
    assert "all zero: midlayer.mlp.down_proj.weight" in caplog.text
    assert any("down_proj" in text for text in draft.provenance.warnings)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("fc.weight", torch.zeros(0)), ("fc.weight", torch.ones(4)), ("norm.weight", torch.ones(1, HIDDEN)),
     ("midlayer.self_attn.q_proj.weight", torch.tensor(1.0)), ("embed_tokens.weight", torch.ones(VOCAB)),
     ("t2d", torch.ones(2, VOCAB, dtype=torch.bool))],
)  # fmt: skip
def test_tensor_of_odd_dimensions_is_named(name, tensor, tmp_path):
    folder = write(tmp_path / "a", llama(**SPECFORGE), mapped()() | {name: tensor})
    with pytest.raises(ValueError, match=f"{name.removeprefix('midlayer.')} must have"):
        load(folder)


def test_embeddings_cut_short_are_no_padding(tmp_path):
    tensors = mapped(embed=True)()
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][:30].clone()
    with pytest.raises(ValueError, match=r"embed_tokens.weight has 30 rows.*token 38.*cut short"):
        load(write(tmp_path / "a", llama(**SPECFORGE), tensors))


def test_pickle_with_nameless_tensors(tmp_path):
    folder = write(tmp_path / "a", llama(**EAGLE), mapped()())
    (folder / "model.safetensors").unlink()
    torch.save({7: torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"tensors by name.* 7"):
        load(folder)


def test_finer_tensors_than_the_draft_are_a_warning(tmp_path, caplog):
    tensors = {
        name: tensor if "norm" in name or not tensor.is_floating_point() else tensor.bfloat16()
        for name, tensor in mapped()().items()
    }
    folder = write(tmp_path / "a", llama(**SPECFORGE), tensors)
    draft = load(folder, dtype="auto")
    assert draft.dtype == torch.bfloat16 and "4 tensors are stored finer" in caplog.text
    caplog.clear()
    kept = load(folder, dtype=torch.float32)
    assert torch.equal(kept.norm.weight, tensors["norm.weight"]) and "finer" not in caplog.text


@pytest.mark.parametrize("dtype", ["int8", torch.int8])
def test_dtype_must_be_a_floating_one(dtype, tmp_path):
    with pytest.raises(ValueError, match="floating-point"):
        load(FIXTURES["eagle"].write(tmp_path / "a"), dtype=dtype)


@pytest.mark.parametrize("ids", ["1,2,3", 3, [1.0, 2, 3]])
def test_callers_ids_must_be_numbers(ids, tmp_path):
    with pytest.raises(ValueError, match="aux_hidden_state_layers must be"):
        load(FIXTURES["eagle"].write(tmp_path / "a"), aux_hidden_state_layers=ids)


@pytest.mark.parametrize("layout", ["published", "own"])
def test_target_of_another_size_is_refused_when_loading(layout, tmp_path):
    if layout == "own":
        folder = own(tmp_path, target_num_hidden_layers=LAYERS)
    else:
        folder = write(tmp_path / "a", llama(**SPECFORGE, target_num_hidden_layers=LAYERS), mapped()())
    assert load(folder, target=target()).config.target_num_hidden_layers == LAYERS
    with pytest.raises(ValueError, match=f"number of layers {LAYERS}, .* is {LAYERS + 2}"):
        load(folder, target=target(layers=LAYERS + 2))
    with pytest.raises(ValueError, match=f"hidden size {HIDDEN}, .* is {2 * HIDDEN}"):
        load(folder, target=target(hidden=2 * HIDDEN))
    with pytest.raises(TypeError, match="target must be the loaded target"):
        load(folder, target="acme/Target")


def test_number_of_ids_that_contradicts_fc_is_told(tmp_path):
    folder = write(tmp_path / "a", llama(**SPECFORGE, eagle_config={AUX: [1, 3]}), mapped()())
    with pytest.raises(ValueError, match=r"gives 2 aux ids .* but fc reads 3 states"):
        load(folder)


def test_own_layout_names_sizes_that_differ(tmp_path):
    with pytest.raises(ValueError, match=r"mismatched keys: .*lm_head\.weight( \[12, 16\], not \[11, 16\]|,|\))"):
        load(own(tmp_path, draft_vocab_size=DRAFT_VOCAB - 1))


@pytest.mark.parametrize(("name", "dtype"), [("d2t", torch.bfloat16), ("fc.weight", torch.int8)])
def test_own_layout_that_was_cast_is_refused(name, dtype, tmp_path):
    folder = own(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ValueError, match=f"{name} is stored as .* was cast"):
        load(folder)


def test_first_norm_that_the_config_denies_is_a_warning(tmp_path, caplog):
    folder = write(
        tmp_path / "a", modelopt({"use_input_layernorm_in_first_layer": False}), base_tensors(draft_vocab=VOCAB)
    )
    load(folder)
    assert "use_input_layernorm_in_first_layer is false" in caplog.text


@pytest.mark.parametrize(
    ("ids", "held"), [([0, 4, 5], False), ([3, 4, 5], False), ([2, 3, 6], False), ([2, 4, 5], True)]
)
def test_eagle_format_refuses_ids_that_are_no_models_default(ids, held, tmp_path):
    draft = load(write(tmp_path / "a", llama(**SPECFORGE), mapped()()), aux_hidden_state_layers=ids)
    assert draft.config.target_num_hidden_layers is None
    if held:
        assert export_draft(draft, tmp_path / "out", "eagle").warnings
    else:
        with pytest.raises(ValueError, match="not the default"):
            export_draft(draft, tmp_path / "out", "eagle")


def test_export_of_ids_whose_reading_was_not_checked_is_a_warning(tmp_path):
    config = modelopt({AUX: [4, 6, LAYERS]})
    folder = write(tmp_path / "a", config, base_tensors(draft_vocab=VOCAB))
    blind = export_draft(load(folder), tmp_path / "blind", "speculators")
    assert any(f"unless the target has {LAYERS} layers" in text for text in blind.warnings)
    sure = export_draft(load(folder, target=target()), tmp_path / "sure", "speculators")
    assert not any("unless" in text for text in sure.warnings)
    assert json.loads((tmp_path / "sure/config.json").read_text())[AUX] == [4, 6, LAYERS]
    usual = write(tmp_path / "b", modelopt(), base_tensors(draft_vocab=VOCAB))
    assert not any("unless" in text for text in export_draft(load(usual), tmp_path / "usual", "speculators").warnings)
