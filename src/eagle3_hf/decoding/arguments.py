"""What a call with a draft is refused for, by name; `docs/generate-arguments.md` has the whole table."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from ..aux_layers import text_config
from .multimodal import media_inputs

_ANOTHER = "it chooses another way of decoding"
# Field: values that mean nothing is asked for, and why anything else is refused.
_REFUSED: dict[str, tuple[tuple, str]] = {
    "num_beams": ((None, 1), "beam search keeps several texts a row"),
    "num_beam_groups": ((None, 1), "beam search keeps several texts a row"),
    "constraints": ((None,), "it needs beam search"),
    "force_words_ids": ((None,), "it needs beam search"),
    "penalty_alpha": ((None, 0.0), _ANOTHER),
    "dola_layers": ((None,), _ANOTHER),
    "prompt_lookup_num_tokens": ((None,), "it is another way of drafting"),
    "assistant_early_exit": ((None,), "it is another way of drafting"),
    "use_mtp": ((None, False), "it is another way of drafting"),
    "speculation_type": ((None,), "it is another way of drafting"),
    "is_assistant": ((None, False), "it stops a model that drafts for another one by its own confidence"),
    "assistant_ensemble_weight": ((None,), "it would let the draft change the text"),
    "num_assistant_tokens_schedule": ((None, "constant"), "num_assistant_tokens stays as it is in a call"),
    "guidance_scale": ((None, 1.0), "its second forward keeps a state between calls"),
    "prefill_chunk_size": ((None,), "the prompt is run in one forward"),
    "token_healing": ((None, False), "it changes prompts without their attention mask"),
    "return_legacy_cache": ((None, False), "the cache's rows differ in length"),
    "use_cache": ((None, True), "verification goes back in the cache"),
}
# The loop has a cache of its own. These kinds hold the same values; the others promise less memory.
_SAME_VALUES = ("dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window")


def settle_fields(config: Any) -> None:
    """Refuse what a draft doesn't go with, and take out what its loop doesn't use.

    Args:
        config: the `GenerationConfig` of this call, prepared by `generate()`; changed in place.

    Raises:
        ValueError: fields that aren't supported, each by name.
    """
    named = [
        f"{name} ({why})"
        for name, (neutral, why) in _REFUSED.items()
        if (value := getattr(config, name, None)) is not None and value not in neutral
    ]
    kind = config.cache_implementation
    if kind is not None and kind not in _SAME_VALUES:
        named.append(f"cache_implementation={kind!r} (keys and values are kept as they are, on their device)")
    if named:
        raise ValueError(f"not supported with an EAGLE-3 draft: {'; '.join(named)}. Generate without assistant_model.")
    config.cache_implementation = None  # nothing is allocated for it
    config._eagle3_draft = True


def refuse_inputs(
    target: Any, input_ids: torch.Tensor, config: GenerationConfig, streamer: Any, kwargs: dict[str, Any]
) -> None:
    """Refuse model inputs and outputs that the loop can't serve.

    Args:
        target, input_ids, streamer: of the call.
        config: as `generate()` prepared it.
        kwargs: the model inputs that `generate()` prepared.

    Raises:
        ValueError: what isn't supported, by name.
    """
    unsupported = {
        "inputs_embeds": kwargs.get("inputs_embeds") is not None,
        "position_ids of your own": _has_own_positions(input_ids, kwargs),
    }
    named = [name for name, given in unsupported.items() if given]
    known = {
        "attention_mask", "position_ids", "past_key_values", "cache", "use_cache", "logits_to_keep", "cache_position",
        "inputs_tensor", "tokenizer", "inputs_embeds", "cache_params", "output_attentions",
        "output_hidden_states", *media_inputs(target),
    }  # fmt: skip
    # transformers 5.2x gives vision-language models an empty `mm_encoder_outputs` for a text without images.
    named += sorted(name for name, value in kwargs.items() if name not in known and value is not None and value != {})
    if named:
        raise ValueError(f"not supported with an EAGLE-3 draft: {', '.join(named)}. Generate without assistant_model.")
    if streamer is not None and input_ids.shape[0] > 1:
        raise ValueError(f"a streamer takes one sequence, the batch has {input_ids.shape[0]}")
    wants_attention = config.return_dict_in_generate and config.output_attentions
    if wants_attention and text_config(target)._attn_implementation != "eager":
        raise ValueError(
            f"output_attentions needs the weights, which attn_implementation="
            f"{text_config(target)._attn_implementation!r} doesn't give: target.set_attn_implementation('eager')"
        )


def _has_own_positions(input_ids: torch.Tensor, kwargs: dict) -> bool:
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is None or positions.dim() != 2:  # those on several axes are the model's
        return False
    real = torch.ones_like(input_ids) if mask is None else mask
    return bool(((positions != real.long().cumsum(-1) - 1) & real.bool()).any())
