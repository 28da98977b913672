"""Tiny checkpoints in the published layouts, written from the facts about them: names, config keys, file kinds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV, HEAD_DIM, MLP, VOCAB, DRAFT_VOCAB, LAYERS = 16, 4, 2, 4, 24, 40, 12, 8
KEPT = torch.tensor([1, 2, 3, 5, 8, 9, 13, 20, 21, 30, 31, 38])
AUX = "eagle_aux_hidden_state_layer_ids"


def random(*shape: int, seed: list[int]) -> torch.Tensor:
    seed[0] += 1
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed[0])) * 0.2


def base_tensors(
    hidden: int = HIDDEN,
    target: int | None = None,
    aux: int = 3,
    layers: int = 1,
    head_dim: int = HEAD_DIM,
    draft_vocab: int = DRAFT_VOCAB,
    first: str = "midlayer",
    embed: bool = False,
    attention_bias: str = "",
    qk_norm: bool = False,
    fc_norm: str = "",
    input_norm: bool = False,
    deep_norm: str = "input_layernorm",
    start: int = 0,
) -> dict[str, torch.Tensor]:
    """A draft's tensors under a publisher's names; `first` is what the layer is called."""
    seed, target = [start], target or hidden
    made: dict[str, torch.Tensor] = {"fc.weight": random(hidden, aux * target, seed=seed)}
    for i in range(layers):
        layer = first if layers == 1 else f"{first.partition('.')[0]}.{i}"
        width = 2 * hidden if i == 0 else hidden
        for name, rows, columns in (
            ("self_attn.q_proj", HEADS * head_dim, width),
            ("self_attn.k_proj", KV * head_dim, width),
            ("self_attn.v_proj", KV * head_dim, width),
            ("self_attn.o_proj", hidden, HEADS * head_dim),
            ("mlp.gate_proj", MLP, hidden),
            ("mlp.up_proj", MLP, hidden),
            ("mlp.down_proj", hidden, MLP),
        ):
            made[f"{layer}.{name}.weight"] = random(rows, columns, seed=seed)
            if name[-6] in attention_bias and name.startswith("self_attn"):
                made[f"{layer}.{name}.bias"] = random(rows, seed=seed)
        norms = ["input_layernorm", "hidden_norm"] if i == 0 else [deep_norm]
        for name in [*norms, "post_attention_layernorm"]:
            made[f"{layer}.{name}.weight"] = 1 + random(hidden, seed=seed)
        if qk_norm:
            for name in ("q_norm", "k_norm"):
                made[f"{layer}.self_attn.{name}.weight"] = 1 + random(head_dim, seed=seed)
    made["norm.weight"] = 1 + random(hidden, seed=seed)
    made["lm_head.weight"] = random(draft_vocab, hidden, seed=seed)
    if embed:
        made["embed_tokens.weight"] = random(VOCAB, hidden, seed=seed)
    if input_norm:
        made["input_norm.weight"] = 1 + random(aux * target, seed=seed)
    if fc_norm:
        names = ("low", "mid", "high") if fc_norm == "legacy" else range(aux)
        for name in names:
            key = f"aux_norm_{name}.weight" if fc_norm == "legacy" else f"fc_norm.{name}.weight"
            made[key] = 1 + random(target, seed=seed)
    return made


def vocabulary_map(t2d: bool = True, dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """`d2t` as offsets, and `t2d` where the layout has it."""
    made = {"d2t": (KEPT - torch.arange(DRAFT_VOCAB)).to(dtype)}
    if t2d:
        made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        made["t2d"][KEPT] = True
    return made


def llama(**changes: Any) -> dict[str, Any]:
    """Config keys that all of them share."""
    return {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "rope_theta": 10000.0, "vocab_size": VOCAB,
    } | changes  # fmt: skip


def speculators(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "acme/Target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": llama() if layer is None else layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "norm_before_residual": True,
    } | changes


def modelopt(eagle: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    nested = {"use_aux_hidden_state": True, "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True,
              "next_layer_regular": True, "parallel_draft_step": 1, AUX: [1, 3, 4]}  # fmt: skip
    return (
        llama(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=VOCAB, eagle_config=nested | (eagle or {}))
        | changes
    )


EAGLE = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB, "target_model_type": "llama"}
ANGELSLIM = {
    "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB, "target_model_type": "qwen3",
    "modal_type": "LLM", "aux_hidden_states_layer_ids": [1, 3, 4],
}  # fmt: skip


@dataclass
class Fixture:
    """A checkpoint, and what a loader must make of it."""

    family: str
    config: dict[str, Any]
    tensors: Callable[[], dict[str, torch.Tensor]]
    kind: str = "safetensors"  # or bin, sharded, sharded-bin
    aux: list[int] | None = None
    expect: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, **changes: Any) -> Path:
        return write(folder, self.config | changes, self.tensors(), self.kind)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], kind: str = "safetensors") -> Path:
    """Write config and tensors as the given kind of file(s)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    elif kind == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        stem, suffix = ("model", "safetensors") if kind == "sharded" else ("pytorch_model", "bin")
        names, places = list(tensors), {}
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            file = f"{stem}-{number:05d}-of-00002.{suffix}"
            content = {name: tensors[name] for name in part}
            save_file(content, folder / file) if suffix == "safetensors" else torch.save(content, folder / file)
            places |= dict.fromkeys(part, file)
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def mapped(**options: Any) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: base_tensors(**options) | vocabulary_map()


def full(drop: str | None = None, **options: Any) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        made = base_tensors(draft_vocab=VOCAB, **options)
        made.pop(drop, None)
        return made

    return make


def prefixed(prefix: str, make: Callable[[], dict[str, torch.Tensor]]) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name if name in {"d2t", "t2d"} else prefix + name: tensor for name, tensor in make().items()}


def with_extras() -> dict[str, torch.Tensor]:
    extras = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2), "verifier_norm.weight": torch.ones(HIDDEN)}
    return base_tensors() | vocabulary_map() | extras


def wide_mapped() -> dict[str, torch.Tensor]:
    """A draft narrower than its target (as that of Llama-3.3-70B)."""
    return base_tensors(target=24, embed=True) | vocabulary_map()


def with_fc_bias() -> dict[str, torch.Tensor]:
    return base_tensors() | vocabulary_map() | {"fc.bias": torch.arange(HIDDEN) / 10}


QWEN = {"model_type": "qwen3", "head_dim": 8}
FIXTURES: dict[str, Fixture] = {
    "eagle": Fixture("eagle", llama(**EAGLE), mapped(), "bin"),
    "eagle-vicuna-wrong-layer-count": Fixture(
        "eagle", llama(**EAGLE, num_hidden_layers=40), mapped(), "bin", expect={"num_hidden_layers": 1}
    ),
    "eagle-70b-wider-target": Fixture(
        "eagle", llama(**EAGLE, target_hidden_size=24), wide_mapped, "bin",
        expect={"target_hidden_size": 24, "own_embeddings": True, "num_aux_hidden_states": 3},
    ),
    "eagle-sharded-bin-extras": Fixture("eagle", llama(**EAGLE), with_extras, "sharded-bin"),
    "specforge": Fixture("specforge", llama(**SPECFORGE), mapped()),
    "specforge-ids": Fixture(
        "specforge", llama(**SPECFORGE, eagle_config={AUX: [1, 3, 5], "use_aux_hidden_state": True}), mapped(),
        "sharded", aux=[2, 4, 6],
    ),
    "specforge-embeddings-prefix": Fixture(
        "specforge", llama(**SPECFORGE), prefixed("draft_model.model.", mapped(embed=True)),
        expect={"own_embeddings": True},
    ),
    "specforge-fc-bias": Fixture("specforge", llama(**SPECFORGE, bias=True), with_fc_bias, expect={"fc_bias": True}),
    "eagle31": Fixture(
        "specforge", llama(**SPECFORGE, norm_output=True, fc_norm=True), mapped(fc_norm="new"),
        expect={"fc_norm": True, "norm_output": True},
    ),
    "eagle31-legacy-norms": Fixture(
        "specforge", llama(**SPECFORGE, use_aux_norm=True), mapped(fc_norm="legacy"), expect={"fc_norm": True}
    ),
    "five-aux": Fixture(
        "specforge",
        llama(**SPECFORGE, num_aux_hidden_states=5, eagle_config={AUX: [1, 2, 3, 5, 6], "norm_output": True}),
        mapped(aux=5, fc_norm="new"), aux=[2, 3, 4, 6, 7], expect={"num_aux_hidden_states": 5},
    ),
    "automodel": Fixture(
        "specforge", llama(architectures=["LlamaEagle3DraftModel"], draft_vocab_size=DRAFT_VOCAB),
        mapped(first="layers.0"),
    ),
    "speculators": Fixture(
        "speculators", speculators(**{AUX: [2, 4, 5]}), mapped(first="layers.0", embed=True), aux=[2, 4, 5],
        expect={"norm_before_residual": True, "own_embeddings": True},
    ),
    "speculators-norm-before-fc": Fixture(
        "speculators", speculators(norm_before_fc=True), mapped(first="layers.0", embed=True, input_norm=True),
        expect={"norm_before_fc": True},
    ),
    "speculators-eagle31": Fixture(
        "speculators", speculators(fc_norm=True, norm_output=True), mapped(first="layers.0", fc_norm="new"),
        expect={"fc_norm": True, "norm_output": True},
    ),
    "speculators-qwen3": Fixture(
        "speculators",
        speculators(llama(**QWEN, attention_bias=True)),
        mapped(first="layers.0", embed=True, qk_norm=True, head_dim=8, attention_bias="qkvo"),
        expect={"qk_norm": True, "attention_bias": True, "head_dim": 8},
    ),
    "speculators-two-layers": Fixture(
        "speculators", speculators(llama(num_hidden_layers=2)), mapped(first="layers.0", layers=2),
        expect={"num_hidden_layers": 2},
    ),
    "speculators-wider-target": Fixture(
        "speculators", speculators(target_hidden_size=24), mapped(first="layers.0", target=24, embed=True),
        expect={"target_hidden_size": 24},
    ),
    "modelopt": Fixture("modelopt", modelopt(), full(), aux=[2, 4, 5]),
    "modelopt-pruned-without-t2d": Fixture(
        "modelopt", modelopt(draft_vocab_size=DRAFT_VOCAB),
        lambda: base_tensors(first="layers.0") | vocabulary_map(t2d=False, dtype=torch.int32), "sharded", aux=[2, 4, 5],
    ),
    "modelopt-no-final-norm": Fixture(
        "modelopt", modelopt({"use_last_layernorm": False}), full("norm.weight"), aux=[2, 4, 5],
        expect={"final_norm": False},
    ),
    "modelopt-norm-before-fc-boundary-ids": Fixture(
        "modelopt", modelopt({AUX: [3, 6, 8], "norm_before_fc": True}, target_num_hidden_layers=LAYERS),
        full(input_norm=True), aux=[3, 6, 8], expect={"norm_before_fc": True},
    ),
    "modelopt-yarn": Fixture(
        "modelopt",
        modelopt(rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        full(), aux=[2, 4, 5],
    ),
    "modelopt-deep": Fixture(
        "modelopt", modelopt({}, num_hidden_layers=2), full(layers=2, deep_norm="hidden_norm"), aux=[2, 4, 5],
        expect={"num_hidden_layers": 2},
    ),
    "modelopt-no-aux": Fixture(
        "modelopt", modelopt({"use_aux_hidden_state": False, AUX: []}), full("fc.weight"),
        expect={"use_aux_hidden_state": False, "num_aux_hidden_states": 1},
    ),
    "modelopt-no-aux-no-hidden-norm": Fixture(
        "modelopt", modelopt({"use_aux_hidden_state": False, AUX: []}),
        lambda: {
            name: t for name, t in full("fc.weight", first="layers.0")().items() if "hidden_norm" not in name
        },
        expect={"use_aux_hidden_state": False},
    ),
    "angelslim": Fixture(
        "angelslim", llama(**ANGELSLIM, tie_word_embeddings=True), mapped(), aux=[2, 4, 5],
        expect={"tie_word_embeddings": False},
    ),
    "angelslim-head-dim-trap": Fixture(
        "angelslim", llama(**ANGELSLIM, head_dim=4) | {"model_type": "qwen3"},
        mapped(head_dim=8, attention_bias="qkv"), aux=[2, 4, 5], expect={"head_dim": 8, "attention_bias": True},
    ),
    "angelslim-multimodal-rope": Fixture(
        "angelslim",
        llama(**ANGELSLIM, rope_scaling={"type": "mrope", "mrope_section": [1, 1]}), mapped(), aux=[2, 4, 5],
    ),
}  # fmt: skip
