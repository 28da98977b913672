"""Prompts with images, videos or sound: the first forward is the model's own, what comes after is text.

Families put features into the text, number its positions and mask it in ways that are too many to list. So such a
prompt is run as plain `generate()` runs it, left padding and all, with what the model itself prepares. Its keys and
values are then moved to where the loop expects them. Afterwards a family's text differs in one thing only: positions
may be shifted, as where multimodal RoPE gives an image fewer of them than it has tokens.

The draft reads the target's hidden states of all that. Its own inputs are the embeddings of the placeholders' ids, at
positions that are simply counted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..aux_layers import text_config
from ..compat import IS_V5, step_inputs
from .outputs import gather_places
from .selfcheck import deviation_allowed
from .tree import chain

if TYPE_CHECKING:
    from .rows import Rows
    from .verifier import Verifier

# Images and so on, and what describes them or says where they stand.
_CONTENT = ("pixel_values", "pixel_values_videos", "input_features", "mm_encoder_outputs")
_DETAILS = (
    "image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts", "pixel_attention_mask", "pixel_mask",
    "token_type_ids", "mm_token_type_ids", "input_features_mask", "feature_attention_mask",
)  # fmt: skip
_TYPES = ("token_type_ids", "mm_token_type_ids")
_KINDS = ("pixel_", "image_", "video_", "audio_", "input_features", "mm_encoder_outputs")
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index", "audio_token_index")


def is_multimodal(target: Any) -> bool:
    """Whether a model has other parts than its text decoder."""
    return text_config(target) is not target.config


def media_inputs(target: Any) -> frozenset[str]:
    """Names of the inputs beside text that prompts of `target` may have with a draft."""
    return frozenset((*_CONTENT, *_DETAILS) if is_multimodal(target) else ())


def _given(kwargs: dict[str, Any], names: Any) -> list[str]:
    # transformers 5.2x gives vision-language models an empty `mm_encoder_outputs` for a text without images.
    return sorted(name for name in names if (value := kwargs.get(name)) is not None and value != {})


def refuse_media(target: Any, kwargs: dict[str, Any]) -> None:
    """Refuse media that can't be speculated after, before any encoder runs.

    Args:
        target: the model.
        kwargs: model inputs given to `generate()`.

    Raises:
        ValueError: inputs that aren't supported, by name.
    """
    known = media_inputs(target)
    unknown = [name for name in kwargs if name.startswith(_KINDS) and name not in known]
    if named := _given(kwargs, unknown):
        raise ValueError(f"not supported with an EAGLE-3 draft: {', '.join(named)}. Generate without assistant_model.")
    past = kwargs.get("cache", kwargs.get("past_key_values"))
    content = _given(kwargs, _CONTENT)
    if content and getattr(past, "get_seq_length", int)() > 0:
        raise ValueError(
            f"not supported with an EAGLE-3 draft: {', '.join(content)} together with past_key_values. It holds what "
            "the model made of earlier images; new ones need the whole text again, without past_key_values"
        )
    if kwargs.get("position_ids") is not None and (content or kwargs["position_ids"].dim() != 2):
        raise ValueError(
            "not supported with an EAGLE-3 draft: position_ids of your own with images, or on several axes. Leave them "
            "out: the model makes them"
        )


def refuse_types_after(kwargs: dict[str, Any], cached: list[int], pads: list[int]) -> None:
    """Refuse token types that mark images among tokens that `past_key_values` doesn't hold.

    Raises:
        ValueError: which input does.
    """
    for name in _given(kwargs, _TYPES) if any(cached) else []:
        types = kwargs[name]
        columns = torch.arange(types.shape[1], device=types.device)
        new = columns >= torch.tensor([pad + have for pad, have in zip(pads, cached)], device=types.device)[:, None]
        if bool((new & (types != 0)).any()):
            raise ValueError(
                f"{name} marks images behind what past_key_values holds: run the whole text again, without "
                "past_key_values"
            )


def runs_own_prompt(target: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the first forward of a prompt must be the model's own."""
    # A model that keeps position offsets is to have those of its last prompt, with images or without.
    return is_multimodal(target) and bool(_given(kwargs, media_inputs(target)) or _offset_modules(target))


def _offset_modules(target: Any) -> list[Any]:
    return [module for module in target.modules() if "rope_deltas" in vars(module)]


def placeholder_ends(target: Any, kwargs: dict[str, Any], rows: Rows) -> list[int] | None:
    """For each row of a call, the length of its prompt up to the last image; `None` where there can't be any."""
    if not is_multimodal(target):
        return None
    pads = (rows.width - rows.prompt_lengths()).tolist()
    ids = [i for name in _PLACEHOLDERS if isinstance(i := getattr(target.config, name, None), int)]
    if not ids:
        return rows.prompt_lengths().tolist() if _given(kwargs, _CONTENT) else None
    found = torch.isin(rows.prompt, torch.tensor(ids, device=rows.device))
    last = torch.where(found, torch.arange(1, rows.width + 1, device=rows.device), 0).max(dim=1).values
    return [max(0, end - pad) for end, pad in zip(last.tolist(), pads)]


def prefill(verifier: Verifier, rows: Rows, model_kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run whole prompts as plain `generate()` does, into the verifier's empty cache.

    Args:
        verifier: its cache is filled, and its `offsets` are set where positions go on elsewhere than at a row's length.
        rows: the texts.
        model_kwargs: the model inputs that `generate()` prepared.

    Returns:
        Logits after each row's last token `[batch, vocab]`, and features `[batch, longest, n_aux * hidden]` with
        padding on the right, as [`Verifier.prefill`].

    Raises:
        ValueError: the model doesn't go on behind such a prompt as the loop does. Other errors are the model's own.
    """
    target, cache, ids = verifier.target, verifier.cache, rows.prompt
    batch, width = ids.shape
    cache.begin_write(None, width, batch=batch)
    kwargs = {**model_kwargs, verifier.cache_argument: cache}
    out, features = verifier.run(step_inputs(target, ids, kwargs, first=True))
    lengths = rows.prompt_lengths()
    last = out.logits[:, -1]
    verifier.offsets = _position_offsets(target, kwargs, rows)
    if (lengths < width).any():
        slots = torch.arange(width, device=ids.device)
        columns = (slots + torch.tensor(width - lengths, device=ids.device)[:, None]) % width
        cache.commit(lengths.tolist(), columns, slots.expand(batch, -1))
        columns = columns[:, : int(lengths.max())]
        features = gather_places(features, columns, 1)
        if verifier.states is not None:
            verifier.states = _without_padding(out, columns)
    else:
        cache.set_lengths(lengths.tolist())
    _check_next(verifier, rows, kwargs, out)
    return last, features


def _without_padding(out: Any, columns: torch.Tensor) -> Any:
    """The hidden states and attentions of `out`, with padding on the right."""
    made = SimpleNamespace()
    if out.get("hidden_states") is not None:
        made.hidden_states = tuple(gather_places(layer, columns, 1) for layer in out.hidden_states)
    if out.get("attentions") is not None:
        made.attentions = tuple(gather_places(gather_places(layer, columns, 2), columns, 3) for layer in out.attentions)
    return made


def _position_offsets(target: Any, kwargs: dict[str, Any], rows: Rows) -> torch.Tensor | None:
    """int64 `[1 or 3, batch]`: what is added to a text position behind the prompt, for each axis of the positions."""
    lengths = torch.tensor(rows.prompt_lengths(), device=rows.device)
    positions = kwargs.get("position_ids")
    if positions is not None:  # 5.x has made them, and counts on from the last ones
        if positions.dim() != 3:
            return None
        offsets = positions[-3:, :, -1].to(rows.device) + 1 - lengths
        if bool((offsets == offsets[:1]).all()):
            offsets = offsets[:1]
    else:
        kept = model_offsets(target, (rows.width - rows.prompt_lengths()).tolist())
        if kept is None:
            return None
        offsets = torch.tensor([kept], device=rows.device)
    return offsets if bool(offsets.any()) else None


def text_offsets(verifier: Verifier) -> list[int] | None:
    """What a later call adds to each row's positions."""
    # There a model goes on from the axis that is furthest.
    return None if verifier.offsets is None else verifier.offsets.amax(dim=0).tolist()


def model_offsets(target: Any, pads: list[int]) -> list[int] | None:
    """What a model remembers of its last prompt: how far each row's positions are ahead of counting.

    Args:
        target: the model.
        pads: columns of padding in front of each row of that prompt.

    Returns:
        `None` if it remembers nothing, or another batch.
    """
    for module in _offset_modules(target):
        deltas, batch = module.rope_deltas, len(pads)
        if deltas is not None and batch % deltas.numel() == 0:
            ahead = deltas.flatten().repeat_interleave(batch // deltas.numel()).tolist()
            # 4.57's are relative to columns, padding counted.
            return ahead if IS_V5 else [delta + pad for delta, pad in zip(ahead, pads)]
    return None


def _check_next(verifier: Verifier, rows: Rows, kwargs: dict[str, Any], out: Any) -> None:
    """Compare one token behind the prompt with plain generation, once for each kind of input a model gets."""
    target, cache = verifier.target, verifier.cache
    given = _given(kwargs, _CONTENT)
    if "mm_encoder_outputs" in given:
        given += [f"{kind} outputs" for kind in kwargs["mm_encoder_outputs"]]
    kind = (text_config(target)._attn_implementation, target.dtype, *given)
    if not given or target.training or kind in target._eagle3_media_checked:
        return
    lengths = list(cache.lengths)
    token = out.logits[:, -1:].argmax(dim=-1).to(rows.device)
    wanted, states, verifier.wanted = verifier.wanted, verifier.states, {}
    try:
        found, _ = verifier.forward(chain(token), rows, None)
    finally:
        verifier.wanted, verifier.states = wanted, states
        cache.set_lengths(lengths)
    kwargs = target._update_model_kwargs_for_generation(out, dict(kwargs))
    kwargs[verifier.cache_argument] = cache.to_dynamic_cache((rows.width - rows.prompt_lengths()).tolist())
    inputs = step_inputs(target, torch.cat((rows.prompt, token), dim=1), kwargs, first=False)
    expected = target(**inputs | {"return_dict": True}).logits[:, -1].float()
    off = (found[:, -1].float() - expected).pow(2).mean(dim=-1).sqrt() / expected.std(dim=-1)
    if not bool((off <= deviation_allowed(target, expected.device)).all()):
        raise ValueError(
            f"{target._eagle3_original_class.__name__} doesn't go on behind {', '.join(given)} as with text (off by "
            f"{float(off.max()):.2g} standard deviations): not supported with an EAGLE-3 draft. Generate without "
            "assistant_model."
        )
    target._eagle3_media_checked.add(kind)
