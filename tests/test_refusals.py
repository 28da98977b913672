"""What can't be done is refused by name, before the first token; nothing is quietly ignored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.generation.streamers
from support import CHAIN, LAYERS, POSITIONS, VOCAB, assert_same_as_plain, config_of, make_draft, make_target, prompts
from transformers import AutoModelForCausalLM, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from eagle3_hf import enable_eagle3

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}


def make(config: str, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(getattr(transformers, config)(**(_SHAPE | changes)))


# Makers, because some configs can't be built on both versions with the same words.
UNFIT: dict[str, tuple[Any, str]] = {
    "T5": (
        lambda: T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=VOCAB)),
        "T5ForConditionalGeneration is an encoder-decoder",
    ),
    "Mamba": (lambda: make("MambaConfig", state_size=4), "MambaForCausalLM .*roll"),
    "RWKV": (lambda: make("RwkvConfig", attention_hidden_size=32), "RwkvForCausalLM keeps a recurrent state"),
    "RecurrentGemma": (
        lambda: make("RecurrentGemmaConfig", intermediate_size=48, lru_width=32, head_dim=8),
        "RecurrentGemmaForCausalLM has layers of type .*(recurrent|linear)",
    ),
    "LFM2": (
        lambda: make("Lfm2Config", intermediate_size=48, num_key_value_heads=2, full_attn_idxs=[1, 3]),
        r"Lfm2ForCausalLM has layers of type \['conv'\]",
    ),
    "Bloom": (lambda: make("BloomConfig"), "BloomForCausalLM takes no position_ids"),
    "Falcon with ALiBi": (lambda: make("FalconConfig", alibi=True), "FalconForCausalLM takes no position_ids"),
    "GPT-1": (
        lambda: make("OpenAIGPTConfig", n_embd=32, n_layer=LAYERS, n_head=4),
        "OpenAIGPTLMHeadModel has no key/value cache",
    ),
    "GPT-Neo, local layers": (
        lambda: make(
            "GPTNeoConfig", num_layers=LAYERS, num_heads=4, attention_types=[[["global", "local"], 2]], window_size=8
        ),
        "GPTNeoForCausalLM applies its sliding window",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_targets_that_cannot_speculate(name):
    maker, words = UNFIT[name]
    model = maker()
    original = type(model)
    with pytest.raises(ValueError, match=words):
        enable_eagle3(model)
    assert type(model) is original


def test_not_a_model():
    with pytest.raises(ValueError, match="takes a transformers PreTrainedModel, got Linear"):
        enable_eagle3(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"LlamaModel (has no generate|takes)"):
        enable_eagle3(transformers.LlamaModel(config_of("llama")))


def test_layer_inputs_of_another_form():
    # Gemma-3n carries four streams through its layers.
    model = make(
        "Gemma3nTextConfig", num_key_value_heads=2, head_dim=8, intermediate_size=48, num_kv_shared_layers=0,
        vocab_size_per_layer_input=VOCAB, activation_sparsity_pattern=[0.0] * LAYERS, hidden_size_per_layer_input=8,
        laurel_rank=4, layer_types=["full_attention"] * LAYERS,
    )  # fmt: skip
    target = enable_eagle3(model.eval())
    with pytest.raises(ValueError, match=r"\[batch, sequence, hidden\], this model's are .*\(4, 2, 3, 32\)"):
        target.generate(**prompts(1, 5), assistant_model=make_draft(target, aux_hidden_state_layers=[1, 2, 3]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 48}, "hidden size 48.* hidden size is 32"),
        ({"hidden_size": 48, "target_hidden_size": 48}, "hidden size 48.* hidden size is 32"),
        ({"vocab_size": 20}, "vocabulary 20.* vocabulary is 16"),
        ({"target_num_hidden_layers": 7}, "number of layers 7.* number of layers is 4"),
        ({"aux_hidden_state_layers": [1, 2, 9], "target_num_hidden_layers": None}, r"\[9\].*0\.\.4"),
    ],
)
def test_drafts_of_another_target(llama, changes, words):
    draft = make_draft(llama, **({"own_embeddings": True} if "hidden_size" in changes else {}), **changes)
    with pytest.raises(ValueError, match=words):
        llama.generate(**prompts(1, 5), assistant_model=draft, max_new_tokens=4)


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"num_assistant_tokens": 0}, "num_assistant_tokens must be at least 1, got 0"),
    ({"num_assistant_tokens": -3}, "num_assistant_tokens must be at least 1, got -3"),
    ({"num_assistant_tokens": 2.5}, "num_assistant_tokens must be a whole number, got 2.5"),
    ({"num_assistant_tokens": POSITIONS}, f"{POSITIONS} draft tokens .* {POSITIONS} positions"),
    ({"tree_top_k": 0}, "tree_top_k must be at least 1"),
    ({"tree_top_k": True}, "tree_top_k must be a whole number"),
    ({"tree_total_tokens": 0}, "tree_total_tokens must be at least 1"),
    ({"assistant_confidence_threshold": 1.0}, r"threshold must be in \[0, 1\), got 1.0"),
    ({"assistant_confidence_threshold": -0.1}, r"threshold must be in \[0, 1\), got -0.1"),
    ({"tree_paths": [(0, 1)]}, "not its parent"),
    ({"tree_paths": [(0,), (12,)]}, "child rank 12, the draft's vocabulary has 12"),
    ({"num_beams": 2}, "(?i)beam|assisted generat"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions needs the weights"),
    ({"inputs_embeds": torch.zeros(1, 5, 32)}, "inputs_embeds"),
    ({"position_ids": torch.arange(3, 8)[None]}, "position_ids of your own"),
]


@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=[" ".join(options) for options, _ in OPTIONS])
def test_options(llama, llama_draft, options, words):
    with pytest.raises(ValueError, match=words):
        llama.generate(**prompts(1, 5), assistant_model=llama_draft, **({"max_new_tokens": 4} | options))


def test_usual_position_ids_are_fine(llama, llama_draft):
    inputs = prompts(2, 7)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    out = llama.generate(**inputs, position_ids=positions, do_sample=False, assistant_model=llama_draft)
    assert out.tolist() == llama.generate(**inputs, do_sample=False).tolist()


def test_token_type_ids_are_not_quietly_dropped(targets, drafts):
    inputs = prompts(1, 6)
    types = torch.ones_like(inputs["input_ids"])
    with pytest.raises(ValueError, match="token_type_ids"):
        targets("gpt2").generate(**inputs, token_type_ids=types, assistant_model=drafts("gpt2"))


def test_a_misspelt_argument_is_still_an_error(llama, llama_draft):
    with pytest.raises(ValueError, match="tree_topk"):
        llama.generate(**prompts(1, 5), assistant_model=llama_draft, tree_topk=3)


def test_tree_options_without_a_draft(llama):
    with pytest.raises(ValueError, match=r"tree_top_k.*Eagle3DraftModel"):
        llama.generate(**prompts(1, 5), tree_top_k=3)
    small = LlamaForCausalLM(config_of("llama"))
    with pytest.raises(ValueError, match=r"tree_paths.*Eagle3DraftModel"):
        llama.generate(**prompts(1, 5), assistant_model=small, tree_paths=[(0,)])


def test_padding_that_is_not_on_the_left(llama, llama_draft):
    for mask in ([[1, 1, 1, 0, 0]], [[1, 0, 1, 1, 1]], [[0, 0, 0, 0, 0]]):
        with pytest.raises(ValueError, match="padded on the left"):
            llama.generate(
                torch.full((1, 5), 4), attention_mask=torch.tensor(mask), assistant_model=llama_draft, max_new_tokens=3
            )


def test_a_streamer_takes_one_sequence(llama, llama_draft):
    class Silent(transformers.generation.streamers.BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            pass

        end = put

    with pytest.raises(ValueError, match="a streamer takes one sequence, the batch has 2"):
        llama.generate(**prompts(2, 5), assistant_model=llama_draft, streamer=Silent())


def test_attention_without_masks(llama_draft):
    target = make_target("llama")
    target.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation='flash_attention_2'"):
        target.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=4)


@pytest.mark.parametrize("broken", ["masks", "positions", "cache", "trees"])
def test_a_family_that_reads_its_inputs_in_a_way_of_its_own(llama_draft, monkeypatch, broken):
    target = make_target("llama")
    inner = target.model.forward
    name = "cache" if "cache" in type(target).forward.__signature__.parameters else "past_key_values"

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(name) is not None:
            if broken == "masks" and kwargs.get("attention_mask") is not None:
                kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
            if broken == "positions":
                kwargs["position_ids"] = torch.zeros_like(kwargs["position_ids"])
            if broken == "cache":
                kwargs[name] = None
            if broken == "trees" and kwargs["attention_mask"] is not None:
                raise RuntimeError("no such masks")
        return inner(*args, **kwargs)

    monkeypatch.setattr(target.model, "forward", forward)
    words = "LlamaForCausalLM doesn't give draft trees the logits of plain forwards"
    if broken == "trees":
        words = "LlamaForCausalLM can't run draft trees: no such masks"
    for _ in range(2):  # it isn't taken for checked after a refusal
        with pytest.raises(ValueError, match=words):
            target.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=4)
    monkeypatch.undo()
    assert assert_same_as_plain(target, llama_draft, prompts(1, 5), CHAIN).accepted > 5


def test_a_target_is_looked_at_once(llama_draft, monkeypatch):
    target = make_target("llama")
    calls: list[int] = []
    monkeypatch.setattr(target.model.layers[0].mlp, "forward", lambda x: calls.append(1) or torch.zeros_like(x))
    counts = []
    for attention in ("sdpa", "sdpa", "sdpa", "eager"):
        target.set_attn_implementation(attention)
        calls.clear()
        target.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=1)
        counts.append(len(calls))
    assert counts == [5, 1, 1, 5]


def rope_target(kind: str) -> Any:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0]}
        rope |= {"original_max_position_embeddings": 24}
    config = config_of("llama", max_position_embeddings=96 if kind == "longrope" else 24)
    config.rope_scaling = rope
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = rope | {"rope_theta": 10000.0}
    config.original_max_position_embeddings = 24
    torch.manual_seed(0)
    target = enable_eagle3(AutoModelForCausalLM.from_config(config).eval())
    target.generation_config.eos_token_id = None
    return target


@pytest.mark.parametrize(("kind", "batch"), [("longrope", 1), ("longrope", 3), ("dynamic", 3)])
def test_rope_that_changes_with_the_length(kind, batch):
    target = rope_target(kind)
    draft = make_draft(target)
    with pytest.raises(ValueError, match=f"{kind} RoPE rotates differently past position 24.*from [0-9]+ to [0-9]+"):
        target.generate(**prompts(batch, 12), assistant_model=draft, max_new_tokens=20)
    # All on one side of the change, or one row that is decoded token by token from there on, is fine.
    assert assert_same_as_plain(target, draft, prompts(batch, 12), CHAIN, max_new_tokens=12).accepted > 5
    if kind == "longrope":
        long = prompts(batch, 30, ragged=False)
        assert assert_same_as_plain(target, draft, long, CHAIN, max_new_tokens=12).accepted > 5


def test_dynamic_rope_of_one_row_goes_past_its_change():
    target = rope_target("dynamic")
    for seed in range(3):
        inputs = prompts(1, 12, seed)
        assert assert_same_as_plain(target, make_draft(target), inputs, CHAIN, max_new_tokens=30).accepted > 0
