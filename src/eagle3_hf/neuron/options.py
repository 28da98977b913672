"""Which of `generate()`'s options compiled graphs can follow."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationConfig

from .config import Eagle3NeuronConfig

# Every field of transformers' GenerationConfig is in one of these four tables; a test holds them complete.
FOLLOWED = frozenset(
    {
        "max_length", "max_new_tokens", "do_sample", "temperature", "top_k", "pad_token_id", "eos_token_id",
        "num_assistant_tokens",
    }
)  # fmt: skip
# What would change the output, with the value at which it does nothing; `None` never does anything.
UNSUPPORTED: dict[str, Any] = {
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
    "guidance_scale": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "watermarking_config": None,
    "stop_strings": None,
    "max_time": None,
    "prompt_lookup_num_tokens": None,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "remove_invalid_values": False,
    "token_healing": False,
    "use_mtp": False,
    "is_assistant": False,
    "speculation_type": None,
    "return_dict_in_generate": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "output_logits": False,
}
UNSUPPORTED_SAMPLING: dict[str, Any] = {
    "top_p": 1.0,
    "min_p": 0.0,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
# What can't change the tokens: how the loaded model would hold its cache and compile, and what belongs to an option
# that is refused itself.
WITHOUT_EFFECT = frozenset(
    {
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_legacy_cache", "low_memory",
        "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config", "early_stopping",
        "length_penalty", "renormalize_logits", "bos_token_id", "decoder_start_token_id",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight",
    }
)  # fmt: skip


def prepare(
    default: GenerationConfig,
    given: GenerationConfig | None,
    options: dict[str, Any],
    compiled: Eagle3NeuronConfig,
) -> GenerationConfig:
    """The configuration of one call: the call's keywords, then `given`, then `default`, as transformers does it.

    Args:
        default: the target's own.
        given: of the call; what it leaves at its default comes from `default`.
        options: the call's keywords.
        compiled: what the graphs were compiled for.

    Raises:
        TypeError: an option that `generate()` doesn't know.
        ValueError: one that compiled graphs can't follow, named.
    """
    config = copy.deepcopy(given or default)
    if given is not None:
        _fill(config, default)
    unknown = config.update(**options)
    if unknown:
        raise TypeError(f"generate() of an exported model doesn't know {sorted(unknown)}")
    drafts, most = config.num_assistant_tokens, compiled.num_speculative_tokens
    said = "num_assistant_tokens" in options or drafts != GenerationConfig().num_assistant_tokens
    if said and drafts not in (None, most):
        raise ValueError(
            f"num_assistant_tokens {drafts}: the graphs were compiled for num_speculative_tokens {most}; export again "
            "to change it"
        )
    wanted = dict(UNSUPPORTED)
    if config.do_sample:
        if not compiled.do_sample:
            own = "" if "do_sample" in options else " (do_sample is the generation config's)"
            raise ValueError(
                f"these graphs are greedy{own}: pass do_sample=False, or export with do_sample=True to sample"
            )
        if config.temperature is not None and not config.temperature > 0:
            raise ValueError(
                f"temperature must be above 0 to sample, got {config.temperature}; do_sample=False is greedy"
            )
        wanted |= UNSUPPORTED_SAMPLING
        if config.top_k != 0:
            raise ValueError("sampling in compiled graphs is over the whole vocabulary: pass top_k=0")
    refused = [
        name for name, idle in wanted.items() if (value := getattr(config, name, None)) is not None and value != idle
    ]
    if refused:
        raise ValueError(f"compiled graphs don't follow {', '.join(refused)}: use generate() of the loaded model")
    return config


def _fill(config: GenerationConfig, default: GenerationConfig) -> None:
    """Take over from `default` what `config` leaves as it is in a new GenerationConfig."""
    untouched = vars(GenerationConfig())
    for name, value in vars(default).items():
        about_the_file = name.startswith("_") or name == "transformers_version"
        if not about_the_file and getattr(config, name, None) == untouched.get(name):
            setattr(config, name, copy.deepcopy(value))


def end_and_padding(config: GenerationConfig) -> tuple[list[int], int | None]:
    """EOS tokens, and the padding token where there is one, from whatever form `config` has them in."""
    eos = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    return eos, None if config.pad_token_id is None else int(config.pad_token_id)


def new_tokens(config: GenerationConfig, options: dict[str, Any], width: int) -> int | None:
    """Most tokens to add to each row, as `generate()` would settle it; `None` where nothing was said.

    Args:
        options: the call's keywords.
        width: columns of the prompt, padding included.

    Raises:
        ValueError: `max_length` is used up by the prompt, or `max_new_tokens` isn't above 0.
    """
    if config.max_new_tokens is not None:
        if config.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {config.max_new_tokens}")
        return config.max_new_tokens
    # transformers 4 has a default of 20 in every configuration; it was hardly meant.
    unsaid = "max_length" not in options and config.max_length == GenerationConfig().max_length
    if config.max_length is None or unsaid:
        return None
    if config.max_length <= width:
        raise ValueError(f"max_length {config.max_length} is used up by the prompt of {width} tokens")
    return config.max_length - width
