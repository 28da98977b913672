"""docs/generate-arguments.md lists every argument and field, and what it says of refusals is so."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from support import DYNAMIC, PAD, prompts
from transformers import CompileConfig, GenerationConfig, GenerationMixin

TABLE = Path(__file__).parents[1] / "docs" / "generate-arguments.md"
ROWS = re.findall(r"^\| (`[^|]*) \|([^|]*)\| (supported|no effect|refused) \|", TABLE.read_text(), re.MULTILINE)
SAME_CACHES = ("dynamic", "static")
STATUS = {name: status for names, _, status in ROWS for name in re.findall(r"`(\w+)`", names)}

REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "constraints": ["any"],
    "force_words_ids": [[4]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 2,
    "use_mtp": True,
    "speculation_type": "dflash",
    "assistant_ensemble_weight": 0.3,
    "is_assistant": True,
    "num_assistant_tokens_schedule": "heuristic",
    "guidance_scale": 1.5,
    "prefill_chunk_size": 4,
    "token_healing": True,
    "return_legacy_cache": True,
    "use_cache": False,
    "cache_implementation": "offloaded",
    "custom_generate": lambda *args, **kwargs: None,
}

# Values that aren't the defaults, so that an effect would show.
NO_EFFECT = {
    "negative_prompt_ids": torch.full((2, 3), 5),
    "negative_prompt_attention_mask": torch.tensor([[1, 1, 0]] * 2),
    "cache_config": {"max_cache_len": 5, "nbits": 2},
    "disable_compile": True,
    "low_memory": True,
    "compile_config": CompileConfig(fullgraph=True),
    "continuous_batching_config": {"block_size": 4},
    "max_cache_len": 6,
    "diversity_penalty": 0.7,
    "early_stopping": True,
    "length_penalty": -3.0,
    "decoder_start_token_id": 5,
    "assistant_lookbehind": 1,
    "target_lookbehind": 1,
    "max_matching_ngram_size": 1,
    "_from_model_config": True,
    "transformers_version": "4.0.0",
}


def known() -> set[str]:
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    return arguments | set(GenerationConfig().to_dict())


def test_the_table_lists_every_name():
    assert known() - set(STATUS) == set()


def test_every_refusal_is_tested():
    assert {name for name, status in STATUS.items() if status == "refused"} == set(REFUSED)


def test_every_name_without_effect_is_tested():
    assert {name for name, status in STATUS.items() if status == "no effect"} == set(NO_EFFECT)


@pytest.mark.parametrize("name", [*NO_EFFECT, *SAME_CACHES])
def test_no_effect(llama, llama_draft, name):
    given = {"cache_implementation": name} if name in SAME_CACHES else {name: NO_EFFECT.get(name)}
    if not set(given) <= known():
        pytest.skip(f"this transformers has no {name}")
    options = {"do_sample": False, "eos_token_id": [3, 7], "pad_token_id": PAD, "max_new_tokens": 20}
    options |= {"assistant_model": llama_draft, **DYNAMIC}
    found = []
    for more in ({}, given):
        tokens = llama.generate(**prompts(2, 9), **options, **more)
        stats = llama.speculation_stats
        found.append((tokens.tolist(), stats.rounds, stats.drafted, stats.accepted_at))
    assert found[0] == found[1]
    assert found[0][1] > 0


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(llama, llama_draft, name):
    if name not in known():
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(ValueError, match=name):
        llama.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=3, **{name: REFUSED[name]})
