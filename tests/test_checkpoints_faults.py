"""Damaged, incomplete and unsupported checkpoints: each is an error that names its cause, never a poor draft."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from checkpoint_fixtures import (
    DRAFT_VOCAB,
    EAGLE,
    FIXTURES,
    HIDDEN,
    KEPT,
    SPECFORGE,
    VOCAB,
    base_tensors,
    llama,
    mapped,
    modelopt,
    speculators,
    vocabulary_map,
    write,
)
from safetensors.torch import load_file, save_file

from eagle3_hf import Eagle3DraftModel


def load(folder: Path, **options):
    return Eagle3DraftModel.from_pretrained(folder, **options)


def refused(folder: Path, message: str, error: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(error, match=message):
        load(folder, **options)


def own(folder: Path) -> Path:
    load(FIXTURES["eagle"].write(folder / "published")).save_pretrained(folder / "own")
    return folder / "own"


def spoil(folder: Path, change) -> Path:
    """Rewrite a folder's `model.safetensors` through `change(tensors)`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


# Kinds of draft that aren't supported.

LATENT = {"midlayer.self_attn.q_a_proj.weight": torch.zeros(4, 32), "fc.weight": torch.zeros(16, 48)}
EAGLE1 = {
    "fc.weight": torch.zeros(HIDDEN, 2 * HIDDEN), "layers.0.self_attn.q_proj.weight": torch.zeros(16, HIDDEN),
}  # fmt: skip
FULL = base_tensors(draft_vocab=VOCAB)
REFUSED = {
    "mla": (llama(architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2"), LATENT, "MLA drafts"),
    "p-eagle-tensor": (
        speculators(), {**mapped(first="layers.0")(), "mask_hidden": torch.zeros(HIDDEN)}, "P-EAGLE.*mask_hidden",
    ),
    "p-eagle-token": (llama(**SPECFORGE, pard_token=3), mapped()(), "P-EAGLE.*pard_token"),
    "p-eagle-steps": (modelopt({"parallel_draft_step": 4}), FULL, "P-EAGLE.*parallel_draft_step = 4"),
    "quantised-int8": (
        llama(**SPECFORGE), {**mapped()(), "midlayer.mlp.up_proj.weight": torch.zeros(24, 16, dtype=torch.int8)},
        "quantised drafts.*int8",
    ),
    "quantised-scales": (
        llama(**SPECFORGE, quantization_config={"quant_method": "compressed-tensors"}),
        {**mapped()(), "midlayer.mlp.up_proj.weight_scale": torch.ones(24, 1)},
        "quantised drafts.*compressed-tensors",
    ),
    "no-aux-with-fc": (
        modelopt({"use_aux_hidden_state": False}), FULL, "use_aux_hidden_state is false, but.*has fc.weight",
    ),
    "eagle-1": (llama(**EAGLE), EAGLE1, "EAGLE-1 or EAGLE-2"),
    "eagle-1-speculators": (speculators(speculators_model_type="eagle"), mapped()(), "speculators_model_type 'eagle'"),
    "experts": (
        llama(**SPECFORGE), {**mapped()(), "midlayer.mlp.experts.0.up_proj.weight": torch.zeros(2, 2)}, "experts",
    ),
    "dflash": (llama(**SPECFORGE, dflash_config={}), mapped()(), "DFlash"),
    "target-folder": (
        llama(architectures=["LlamaForCausalLM"]), {"model.embed_tokens.weight": torch.zeros(4, 4)},
        "no EAGLE-3 draft of a known layout",
    ),
    "later-layers-read-embeddings": (
        modelopt(num_hidden_layers=2),
        base_tensors(layers=2, draft_vocab=VOCAB) | {"midlayer.1.self_attn.q_proj.weight": torch.zeros(16, 32)},
        "next_layer_regular",
    ),
    "eh-proj": (modelopt({"eh_proj_before_attn": True}), FULL, "eh_proj_before_attn"),
    "mtp-norm": (modelopt({"use_mtp_layernorm": True}), FULL, "use_mtp_layernorm"),
    "partial-rope": (llama(**EAGLE, partial_rotary_factor=0.5), mapped()(), "partial_rotary_factor 0.5"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_kinds_are_refused_by_name(kind: str, tmp_path: Path):
    config, tensors, message = REFUSED[kind]
    refused(write(tmp_path, config, tensors), message)


def test_each_refusal_has_its_own_message(tmp_path: Path):
    said = set()
    for kind, (config, tensors, _) in REFUSED.items():
        with pytest.raises(ValueError, match=r"\w") as error:
            load(write(tmp_path / kind, config, tensors))
        said.add(str(error.value))
    assert len(said) == len(REFUSED)


def test_quantisation_key_over_plain_weights_is_only_a_warning(tmp_path: Path):
    folder = FIXTURES["eagle"].write(tmp_path, quantization_config={"quant_method": "fp8"})
    assert any("fp8" in text for text in load(folder).provenance.warnings)


# Damage.


@pytest.mark.parametrize("published", [True, False], ids=["published", "own"])
def test_nan(published: bool, tmp_path: Path):
    folder = FIXTURES["specforge"].write(tmp_path) if published else own(tmp_path)
    name = "midlayer.mlp.up_proj.weight" if published else "layers.0.mlp.up_proj.weight"

    def change(tensors):
        tensors[name][3, 4] = float("nan")
        tensors["fc.weight"][0, 0] = float("inf")

    refused(spoil(folder, change), rf"NaN or infinite.*{name.replace('.', '[.]')} \(1 values\)")


@pytest.mark.parametrize("published", [True, False], ids=["published", "own"])
def test_truncated_safetensors(published: bool, tmp_path: Path):
    folder = FIXTURES["specforge"].write(tmp_path) if published else own(tmp_path)
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    refused(folder, r"model\.safetensors is damaged or cut short")


@pytest.mark.parametrize("name", ["specforge-ids", "eagle-sharded-bin-extras"])
def test_truncated_and_missing_shards(name: str, tmp_path: Path):
    folder = FIXTURES[name].write(tmp_path)
    shard = next(folder.glob("*00002-of*"))
    os.truncate(shard, shard.stat().st_size // 2)
    refused(folder, f"{shard.name} is damaged or cut short")
    shard.unlink()
    refused(folder, f"aren't there: {shard.name}")


def test_shard_without_a_promised_tensor(tmp_path: Path):
    folder = FIXTURES["specforge-ids"].write(tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, shard)
    refused(folder, f"lack tensors that their index names: {name}")


class Code:
    def __reduce__(self):
        return os.system, ("touch /tmp/eagle3_hf_pwned",)


@pytest.mark.parametrize("place", ["weights", "side file"])
def test_pickle_with_code(place: str, tmp_path: Path):
    folder = write(tmp_path, llama(**EAGLE), base_tensors(), "bin")
    file = folder / ("pytorch_model.bin" if place == "weights" else "eagle_meta.pt")
    torch.save({"d2t": Code()}, file)
    refused(folder, rf"{file.name} is refused: unpickling it would run code \((posix|os)\.system\)")
    assert not Path("/tmp/eagle3_hf_pwned").exists()


def test_bin_of_other_things(tmp_path: Path):
    folder = write(tmp_path, llama(**EAGLE), {}, "bin")
    torch.save({"fc.weight": [1, 2]}, folder / "pytorch_model.bin")
    refused(folder, r"no tensors: fc\.weight")
    torch.save([1], folder / "pytorch_model.bin")
    refused(folder, "must hold a dict")


def test_renamed_norm(tmp_path: Path):
    def change(tensors):
        tensors["midlayer.hidden_layernorm.weight"] = tensors.pop("midlayer.hidden_norm.weight")

    folder = spoil(FIXTURES["specforge"].write(tmp_path), change)
    refused(folder, r"missing: layers\.0\.hidden_norm\.weight; unknown: layers\.0\.hidden_layernorm\.weight")


def test_renamed_norm_in_own_layout(tmp_path: Path):
    folder = spoil(own(tmp_path), lambda t: t.update({"layers.0.old.weight": t.pop("layers.0.hidden_norm.weight")}))
    refused(folder, r"missing keys: layers\.0\.hidden_norm\.weight; unexpected keys: layers\.0\.old\.weight")


def test_missing_final_norm_needs_the_config_to_say_so(tmp_path: Path):
    tensors = base_tensors(draft_vocab=VOCAB)
    del tensors["norm.weight"]
    refused(write(tmp_path, modelopt(), tensors), r"norm\.weight is missing")


def test_one_name_twice(tmp_path: Path):
    tensors = mapped()()
    tensors["model.fc.weight"] = tensors["fc.weight"] + 1
    refused(write(tmp_path, llama(**EAGLE), tensors), r"'fc\.weight' and 'model\.fc\.weight'")


def test_pruned_head_missing(tmp_path: Path):
    tensors = mapped()()
    del tensors["lm_head.weight"]
    refused(write(tmp_path, llama(**EAGLE), tensors), "lm_head.weight is missing, and the draft vocabulary is pruned")


def test_wider_target_needs_own_embeddings(tmp_path: Path):
    folder = write(tmp_path, llama(**EAGLE, target_hidden_size=24), mapped(target=24)())
    refused(folder, "must bring embed_tokens.weight")


def test_files_that_are_missing_or_broken(tmp_path: Path):
    refused(tmp_path, "has no config.json", OSError)
    (tmp_path / "config.json").write_text(json.dumps(llama(**EAGLE)))
    refused(tmp_path, "has no weights", OSError)
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "config.json isn't valid JSON")


# The vocabulary map.


def with_map(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return base_tensors() | vocabulary_map() | tensors


def test_missing_map(tmp_path: Path):
    tensors = with_map()
    del tensors["d2t"]
    refused(write(tmp_path / "a", llama(**EAGLE), tensors), r"d2t is missing.*t2d keeps 12 tokens")
    del tensors["t2d"]
    refused(write(tmp_path / "b", llama(**EAGLE), tensors), "d2t is missing: the head has 12 rows, the target 40")


def test_missing_map_in_own_layout(tmp_path: Path):
    refused(spoil(own(tmp_path), lambda tensors: tensors.pop("d2t")), "missing keys: d2t")


def test_map_out_of_range_repeated_or_too_long(tmp_path: Path):
    offsets = vocabulary_map()["d2t"]
    outside, twice = offsets.clone(), offsets.clone()
    outside[-1] += 2
    twice[1] = -1 + offsets[0]
    for name, broken, message in (
        ("outside", outside, "1 target ids are outside 0..39"),
        ("twice", twice, "1 target ids occur twice"),
        ("long", torch.cat((offsets, offsets[-1:])), "d2t has 13 entries, lm_head has 12 rows"),
        ("half", offsets.half(), "d2t is stored as torch.float16"),
    ):
        refused(write(tmp_path / name, llama(**EAGLE), with_map(d2t=broken)), message)


def test_broken_map_in_own_layout(tmp_path: Path):
    refused(spoil(own(tmp_path), lambda tensors: tensors["d2t"].add_(5)), "d2t is broken")


def test_map_of_target_ids_instead_of_offsets(tmp_path: Path):
    draft = load(write(tmp_path, llama(**EAGLE), with_map(d2t=KEPT.clone())))
    assert torch.equal(draft.draft_to_target(torch.arange(DRAFT_VOCAB)), KEPT)
    assert any("target ids, not the usual offsets" in text for text in draft.provenance.warnings)


def test_t2d_decides_between_two_valid_readings(tmp_path: Path):
    ids = torch.arange(DRAFT_VOCAB) * 2  # as offsets: 0, 3, 6, ... 33, which is valid too
    for name, kept in (("target ids", ids), ("offsets", ids + torch.arange(DRAFT_VOCAB))):
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[kept] = True
        draft = load(write(tmp_path / name, llama(**EAGLE), with_map(d2t=ids, t2d=t2d)))
        assert torch.equal(draft.draft_to_target(torch.arange(DRAFT_VOCAB)), kept)


def test_wrong_t2d_is_rebuilt(tmp_path: Path):
    wrong = torch.zeros(VOCAB, dtype=torch.bool)
    draft = load(write(tmp_path, llama(**EAGLE), with_map(t2d=wrong)))
    assert draft.t2d.nonzero().flatten().equal(KEPT)
    assert any("t2d contradicts d2t at 12 tokens" in text for text in draft.provenance.warnings)


def test_unordered_map_is_kept_as_it_is(tmp_path: Path):
    order = torch.randperm(DRAFT_VOCAB, generator=torch.Generator().manual_seed(0))
    ids = KEPT[order]
    draft = load(write(tmp_path, llama(**EAGLE), with_map(d2t=ids - torch.arange(DRAFT_VOCAB))))
    assert torch.equal(draft.draft_to_target(torch.arange(DRAFT_VOCAB)), ids)


def test_padding_of_own_embeddings_and_head(tmp_path: Path):
    tensors = with_map(**{"embed_tokens.weight": torch.randn(VOCAB + 24, HIDDEN)})
    draft = load(write(tmp_path / "embeddings", llama(**EAGLE), tensors))
    assert draft.config.vocab_size == VOCAB
    assert torch.equal(draft.embed_tokens.weight, tensors["embed_tokens.weight"][:VOCAB])
    head = base_tensors(draft_vocab=VOCAB + 24)
    draft = load(write(tmp_path / "head", llama(**EAGLE) | {"draft_vocab_size": VOCAB}, head))
    assert torch.equal(draft.lm_head.weight, head["lm_head.weight"][:VOCAB])
    foreign = with_map(**{"embed_tokens.weight": torch.randn(VOCAB + 5000, HIDDEN)})
    refused(write(tmp_path / "foreign", llama(**EAGLE), foreign), "different tokenizers")


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ("yarn", "rope_scaling must be an object, got 'yarn'"),
        ({"type": "spiral", "factor": 2.0}, "RoPE of type 'spiral' isn't known"),
        ({"type": "linear"}, "RoPE of type 'linear' needs a `factor`"),
    ],
)
def test_rope_that_is_not_understood(scaling, message: str, tmp_path: Path):
    refused(write(tmp_path, llama(**EAGLE, rope_scaling=scaling), mapped()()), message)


@pytest.mark.parametrize("published", [True, False], ids=["published", "own"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x" * 100), "it is gzip-compressed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "Git LFS pointer"),
        (b"<!doctype html>", "it is a web page"),
        (bytes(range(200, 256)), "isn't a file that torch.save wrote|is damaged or cut short"),
        (b"", "is empty|is damaged or cut short"),
    ],
    ids=["gzip", "lfs", "html", "garbage", "empty"],
)
def test_bin_that_is_something_else(content: bytes, message: str, published: bool, tmp_path: Path):
    folder = tmp_path / "draft"
    if published:
        FIXTURES["eagle"].write(folder)
    else:
        folder = own(tmp_path)
        (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    refused(folder, message)
    refused(folder, "pytorch_model.bin")


@pytest.mark.parametrize("published", [True, False], ids=["published", "own"])
@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"x" * 100),
        b"\xff" * 7 + b"\x7f" + b"{}",
        (1 << 40).to_bytes(8, "little") + b"{}",
        b"",
        b"[]" * 40,
    ],
    ids=["gzip", "header-huge", "header-beyond-the-file", "empty", "garbage"],
)
def test_safetensors_that_is_something_else(content: bytes, published: bool, tmp_path: Path):
    folder = FIXTURES["specforge"].write(tmp_path / "draft") if published else own(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, r"model\.safetensors is damaged or cut short \(.*bytes\)")


def test_one_tensor_in_two_shards(tmp_path: Path):
    folder = FIXTURES["specforge-ids"].write(tmp_path)
    first, second = sorted(folder.glob("*.safetensors"))
    save_file(load_file(second) | {"fc.weight": load_file(first)["fc.weight"]}, second)
    refused(folder, rf"{second.name} holds tensors that another shard holds too: fc\.weight")


@pytest.mark.parametrize("content", [{}, {"weight_map": ["fc.weight"]}, {"weight_map": {"fc.weight": 1}}])
def test_index_without_a_map(content: dict, tmp_path: Path):
    folder = FIXTURES["specforge-ids"].write(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    refused(folder, r"index\.json has no weight_map")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_weights_of_a_wrong_dtype(dtype: torch.dtype, tmp_path: Path):
    tensors = mapped()()
    tensors["midlayer.mlp.up_proj.weight"] = tensors["midlayer.mlp.up_proj.weight"].to(dtype)
    message = rf"aren't floating-point numbers: midlayer\.mlp\.up_proj\.weight \({dtype}\)"
    refused(write(tmp_path, llama(**EAGLE), tensors, "bin"), message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads must be a whole number above 0, got '4'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a whole number above 0, got 0"),
        ({"hidden_act": "sillu"}, "hidden_act 'sillu' isn't known"),
    ],
)
def test_config_values_that_make_no_sense(changes: dict, message: str, tmp_path: Path):
    refused(FIXTURES["specforge"].write(tmp_path, **changes), message)


def test_index_that_points_elsewhere(tmp_path: Path):
    folder = FIXTURES["specforge-ids"].write(tmp_path / "in")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../other.safetensors"}}))
    refused(folder, r"outside its own folder: \.\./other\.safetensors")
