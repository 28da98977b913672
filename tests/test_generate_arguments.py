"""docs/generate-arguments.md lists every argument and field, and what it says of refusals is so."""

import inspect
import re
from pathlib import Path

import pytest
from support import prompts
from transformers import GenerationConfig, GenerationMixin

TABLE = Path(__file__).parents[1] / "docs" / "generate-arguments.md"
ROWS = re.findall(r"^\| (`[^|]*) \|([^|]*)\| (supported|no effect|refused) \|", TABLE.read_text(), re.MULTILINE)
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
    "num_assistant_tokens_schedule": "heuristic",
    "guidance_scale": 1.5,
    "prefill_chunk_size": 4,
    "token_healing": True,
    "return_legacy_cache": True,
    "use_cache": False,
    "cache_implementation": "offloaded",
    "custom_generate": lambda *args, **kwargs: None,
}


def known() -> set[str]:
    arguments = set(inspect.signature(GenerationMixin.generate).parameters) - {"self"}
    return arguments | set(GenerationConfig().to_dict())


def test_the_table_lists_every_name():
    assert known() - set(STATUS) == set()


def test_every_refusal_is_tested():
    assert {name for name, status in STATUS.items() if status == "refused"} == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(llama, llama_draft, name):
    if name not in known():
        pytest.skip(f"this transformers has no {name}")
    with pytest.raises(ValueError, match=name):
        llama.generate(**prompts(1, 5), assistant_model=llama_draft, max_new_tokens=3, **{name: REFUSED[name]})
