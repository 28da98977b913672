"""Other ways to call `generate()`: pipelines, generation configs, assistants that are no EAGLE-3 draft."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from support import PAD, SHAPES, config_of, oracle, prompts
from test_stopping import tiny_tokenizer
from transformers import GenerationConfig, LlamaForCausalLM, pipeline

from eagle3_hf import disable_eagle3
from eagle3_hf.decoding.loop import speculate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TEXTS = ["hcabdl", "dk", "ghaeb", "lfjc", "b"]
CHATS = [
    [{"role": "user", "content": "hcab"}],
    [{"role": "user", "content": "dlk"}, {"role": "assistant", "content": "ca"}, {"role": "user", "content": "g"}],
    [{"role": "user", "content": "fe"}, {"role": "assistant", "content": "ab"}],  # to be continued
]


def tokenizer() -> Any:
    made = tiny_tokenizer()
    made.pad_token, made.padding_side = "a", "left"
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "batch_size"), [("one", None), ("list", None), ("list", 3), ("chat", None), ("chats", 3)]
)
def test_pipeline(llama, llama_draft, kind, batch_size, shape):
    given = {"one": TEXTS[0], "list": TEXTS, "chat": CHATS[1], "chats": CHATS}[kind]
    run = pipeline("text-generation", model=llama, tokenizer=tokenizer())
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PAD}
    options |= {"batch_size": batch_size, "eos_token_id": [3, 7]} if batch_size else {}
    # A pipeline says nothing of the texts as tokens, so they are taken where `generate()` returns them.
    texts: list[list[int]] = []
    generate = llama.generate

    def listen(input_ids: torch.Tensor, attention_mask: torch.Tensor, **more: Any) -> torch.Tensor:
        out = generate(input_ids=input_ids, attention_mask=attention_mask, **more)
        texts.extend(row[pad:] for row, pad in zip(out.tolist(), (1 - attention_mask).sum(dim=1).tolist()))
        return out

    with mock.patch.object(llama, "generate", listen):
        plain = run(given, **options)
    calls: list[int] = []

    def count(*args: Any, **more: Any) -> Any:
        out = speculate(*args, **more)
        calls.append(llama.speculation_stats.accepted)
        return out

    with oracle(texts), mock.patch("eagle3_hf.decoding.loop.speculate", count):
        fast = run(given, assistant_model=llama_draft, **options, **SHAPES[shape])
    assert fast == plain
    rows = 1 if kind in ("one", "chat") else len(given)
    assert len(calls) == -(-rows // (batch_size or 1))
    assert sum(calls) > 0


def small_assistant() -> LlamaForCausalLM:
    torch.manual_seed(1)
    small = LlamaForCausalLM(config_of("llama")).eval()
    small.generation_config.eos_token_id = None
    return small


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("way", ["assistant", "same model", "prompt lookup"])
def test_other_assistants_are_transformers_own(llama, way, sampled):
    bare = disable_eagle3(copy.deepcopy(llama))
    inputs, found = prompts(1, 12, ragged=False), []
    options: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": 20, "eos_token_id": 15, "pad_token_id": PAD}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    for model in (bare, llama):
        small = copy.deepcopy(model) if way == "same model" else small_assistant()
        more: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if way == "prompt lookup" else {"assistant_model": small}
        calls: list[int] = []
        handle = small.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        with mock.patch("eagle3_hf.decoding.loop.speculate", side_effect=AssertionError("our loop")):
            out = model.generate(**inputs, **options, **more)
        handle.remove()
        assert "speculation_stats" not in out
        found.append((out.sequences.tolist(), torch.stack(out.scores).tolist(), len(calls)))
    # Packed linears round differently.
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(torch.tensor(found[0][1]), torch.tensor(found[1][1]), atol=1e-4, rtol=1e-4)
    assert found[0][2] == found[1][2]
    assert (found[0][2] > 0) == (way != "prompt lookup")


def test_a_generation_config_carries_the_options_but_not_the_draft(llama, llama_draft):
    inputs = prompts(2, 9)
    plain = llama.generate(**inputs, do_sample=False, max_new_tokens=14)
    config = GenerationConfig(do_sample=False, max_new_tokens=14, num_assistant_tokens=2, pad_token_id=PAD)
    before = config.to_dict()
    out = llama.generate(**inputs, generation_config=config, assistant_model=llama_draft)
    assert out.tolist() == plain.tolist()
    assert len(llama.speculation_stats.speculated) == 2
    assert config.to_dict() == before
    trees = GenerationConfig(**before | {"tree_top_k": 3, "tree_total_tokens": 5})
    for more, nodes in (({}, 6), ({"tree_total_tokens": 4}, 5)):  # keywords win
        llama.generate(**inputs, generation_config=trees, assistant_model=llama_draft, **more)
        assert llama.speculation_stats.candidates_per_round == nodes
    assert llama.generate(**inputs, generation_config=trees).tolist() == plain.tolist()
    # transformers refuses generate()'s arguments on a config, and so does every call of ours.
    with pytest.raises(ValueError, match="assistant_model"):
        GenerationConfig(assistant_model=llama_draft)
    config.assistant_model = llama_draft
    with pytest.raises(ValueError, match="assistant_model"):
        llama.generate(**inputs, generation_config=config)
