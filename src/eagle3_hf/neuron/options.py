"""Which of `generate()`'s options compiled graphs can follow."""

from __future__ import annotations

import copy
from typing import Any

from transformers import GenerationConfig

# What would change the output, with the value at which it does nothing.
_UNSUPPORTED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "diversity_penalty": 0.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": None,
    "min_length": 0,
    "min_new_tokens": None,
    "watermarking_config": None,
    "stop_strings": None,
    "max_time": None,
    "prompt_lookup_num_tokens": None,
    "dola_layers": None,
    "return_dict_in_generate": False,
}
_UNSUPPORTED_SAMPLING: dict[str, Any] = {
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_OLD_DEFAULT_MAX_LENGTH = 20


def prepare(default: GenerationConfig, given: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
    """The configuration of one call.

    Raises:
        TypeError: an option that `generate()` doesn't know.
        ValueError: one that compiled graphs can't follow, named.
    """
    config = copy.deepcopy(given or default)
    unknown = config.update(**options)
    if unknown:
        raise TypeError(f"generate() of an exported model doesn't know {sorted(unknown)}")
    wanted = dict(_UNSUPPORTED)
    if config.do_sample:
        wanted |= _UNSUPPORTED_SAMPLING
        if getattr(config, "top_k", None) != 0:
            raise ValueError("sampling in compiled graphs is over the whole vocabulary: pass top_k=0")
    refused = [
        name for name, idle in wanted.items() if (value := getattr(config, name, None)) is not None and value != idle
    ]
    if refused:
        raise ValueError(f"compiled graphs don't follow {', '.join(refused)}: use generate() of the loaded model")
    return config


def new_tokens(config: GenerationConfig, options: dict[str, Any], width: int) -> int | None:
    """Most tokens to add to each row, as `generate()` would settle it; `None` where nothing was said.

    Args:
        options: the call's keywords.
        width: columns of the prompt, padding included.

    Raises:
        ValueError: `max_length` is used up by the prompt.
    """
    if config.max_new_tokens is not None:
        return config.max_new_tokens
    # transformers 4 writes its default of 20 into every configuration; it was hardly meant.
    if config.max_length is None or ("max_length" not in options and config.max_length == _OLD_DEFAULT_MAX_LENGTH):
        return None
    if config.max_length <= width:
        raise ValueError(f"max_length {config.max_length} is used up by the prompt of {width} tokens")
    return config.max_length - width
