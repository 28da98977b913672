"""Fields of a `GenerationConfig` that a draft doesn't go with; `docs/generate-arguments.md` has the whole table."""

from __future__ import annotations

from typing import Any

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


def refuse_media(kwargs: dict[str, Any]) -> None:
    """Refuse the inputs of vision and audio encoders before these run; texts alone are fine.

    Args:
        kwargs: model inputs given to `generate()`.

    Raises:
        ValueError: images, videos or audio, each input by name.
    """
    kinds = ("pixel_", "image_", "video_", "input_features", "mm_encoder_outputs")
    named = sorted(name for name, value in kwargs.items() if name.startswith(kinds) and value is not None)
    if named:
        raise ValueError(
            f"not supported with an EAGLE-3 draft: {', '.join(named)} (the text decoder speculates on texts alone). "
            "Generate without assistant_model."
        )
