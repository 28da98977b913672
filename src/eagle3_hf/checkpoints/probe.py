"""Is the draft read right? Measures how well it predicts with neighbouring aux ids and other norm variants.

A draft that is read with its ids off by one, or with a norm too many, still runs; it is only wrong more often. So
each reading is tried on the same text, and the numbers say which one the draft was trained with. Readings are compared
place by place, by the log-probability that they give the target's token: neighbouring layers hold nearly the same
state, and how often the first token is right tells them apart only over many thousand places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ..aux_layers import FINAL_STATE, default_aux_layers, find_decoder
from ..modeling_eagle3 import Eagle3DraftModel
from .verdict import Reading, Verdict, better, judge, pick

_OFFSETS = (-2, -1, 1, 2)


@dataclass
class _Text:
    ids: torch.Tensor  # [1, sequence]
    answers: torch.Tensor  # [sequence], the target's greedy next token at each place
    states: dict[int, torch.Tensor]  # aux id -> [1, sequence, hidden]
    embeds: torch.Tensor  # [1, sequence, hidden]
    start: int  # first place of the target's own text


@torch.no_grad()
def probe_draft(
    target: Any,
    draft: Eagle3DraftModel,
    prompts: Sequence[torch.Tensor],
    new_tokens: int = 48,
    offsets: Sequence[int] = _OFFSETS,
    enough: int | None = None,
) -> Verdict:
    """Measure the draft as loaded and every other reading of it.

    Args:
        target: a model with [`Eagle3TargetMixin`].
        draft: its draft.
        prompts: int64 `[1, sequence]` each; the target continues them greedily.
        new_tokens: length of each continuation.
        offsets: what to add to all aux ids.
        enough: stop after this many prompts if the verdict is certain by then; `None` uses all at once.

    Returns:
        The readings and a verdict in words.

    Raises:
        ValueError: the draft doesn't fit the target, or no prompt was given.
    """
    from ..target import check_draft_fits

    if not prompts:
        raise ValueError("probing needs at least one prompt")
    ids = check_draft_fits(target, draft)
    depth = len(find_decoder(target, target._eagle3_layers_attribute)[0])
    wanted = _candidates(ids, depth, offsets)
    captured = {i for each in wanted.values() for i in each}
    texts: list[_Text] = []
    for end in [len(prompts)] if enough is None or enough >= len(prompts) else [enough, len(prompts)]:
        texts += [_continue(target, prompt, captured, new_tokens) for prompt in prompts[len(texts) : end]]
        verdict = judge(_readings(draft, texts, wanted))
        if verdict.certain:
            break
    return verdict


def _candidates(ids: tuple[int, ...], depth: int, offsets: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Aux ids to try, by the name of the reading."""
    made = {"as loaded": ids}
    if ids == (FINAL_STATE,):
        made |= {"state before the final norm": (depth,), "input of the last layer": (depth - 1,)}
        return made
    for offset in offsets:
        made[f"aux ids {offset:+d}"] = tuple(i + offset for i in ids)
    if len(ids) == 1:
        made["state after the final norm"] = (FINAL_STATE,)
    elif depth >= 8:  # a shallower model's defaults coincide
        made["default aux ids"] = default_aux_layers(depth)
    valid = {
        name: each for name, each in made.items() if each == (FINAL_STATE,) or 0 <= min(each) <= max(each) <= depth
    }
    return {
        name: each
        for number, (name, each) in enumerate(valid.items())
        if len(each) == len(ids) and each not in list(valid.values())[:number]
    }


def _readings(draft: Eagle3DraftModel, texts: list[_Text], wanted: dict[str, tuple[int, ...]]) -> list[Reading]:
    made = [_measure(draft, texts, each, name, {}) for name, each in wanted.items()]
    loaded = made[0]
    flip, label = _flip(draft, "norm_before_residual")
    made.append(_measure(draft, texts, loaded.ids, label, flip))
    if better(made[-1], loaded):
        # With a wrong norm the ids can't be judged: they are tried again with the other one.
        made += [_measure(draft, texts, each, f"{name}, {label}", flip) for name, each in list(wanted.items())[1:]]
    elif (best := pick(made)) is not loaded:
        made.append(_measure(draft, texts, best.ids, f"{best.name}, {label}", flip))
    best = pick(made)
    if draft.config.final_norm:
        flip, label = _flip(draft, "norm_output")
        label = label if best is loaded else f"{best.name}, {label}"
        made.append(_measure(draft, texts, best.ids, label, best.changes | flip))
    return made


def _flip(draft: Eagle3DraftModel, name: str) -> tuple[dict[str, bool], str]:
    value = not getattr(draft.config, name)
    return {name: value}, f"{name} {'on' if value else 'off'}"


def _continue(target: Any, prompt: torch.Tensor, ids: set[int], new_tokens: int) -> _Text:
    full = target.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new_tokens
    )
    states: dict[int, torch.Tensor] = {}
    # The final state is captured alone: it never joins others.
    for group in ([i for i in sorted(ids) if i != FINAL_STATE], [FINAL_STATE] if FINAL_STATE in ids else []):
        if group:
            with target.capture_aux_hidden_states(group) as capture:
                logits = target(input_ids=full, attention_mask=torch.ones_like(full), use_cache=False).logits
            states |= dict(zip(group, capture.take()))
    embeds = target.get_input_embeddings()(full)
    return _Text(full, logits[0].argmax(dim=-1), states, embeds, prompt.shape[1] - 1)


@contextmanager
def _changed(draft: Eagle3DraftModel, changes: dict[str, bool]) -> Iterator[None]:
    """Run the draft with other switches for a while; none of them has weights of its own."""
    before = {name: getattr(draft.config, name) for name in changes}
    try:
        for name, value in changes.items():
            _switch(draft, name, value)
        yield
    finally:
        for name, value in before.items():
            _switch(draft, name, value)


def _switch(draft: Eagle3DraftModel, name: str, value: bool) -> None:
    setattr(draft.config, name, value)
    if name == "norm_before_residual":
        for layer in draft.layers:
            layer.norm_before_residual = value


def _measure(
    draft: Eagle3DraftModel, texts: list[_Text], ids: tuple[int, ...], name: str, changes: dict[str, bool]
) -> Reading:
    device = draft.d2t.device
    row_of = torch.full((draft.config.vocab_size,), -1, device=device)
    rows = torch.arange(draft.config.draft_vocab_size, device=device)
    row_of[draft.draft_to_target(rows)] = rows
    with _changed(draft, changes):
        found = [_measure_text(draft, text, ids, row_of) for text in texts]
    first, log_probs, second, second_log_probs = (torch.cat(parts).cpu() for parts in zip(*found))
    known = log_probs[~log_probs.isnan()]
    return Reading(
        name=name,
        ids=ids,
        changes=changes,
        first=float(first.float().mean()),
        second=float(second.float().mean()) if len(second) else 0.0,
        places=len(first),
        second_places=len(second),
        log_prob=float(known.mean()) if len(known) else float("-inf"),
        log_probs=log_probs,
        second_log_probs=second_log_probs,
    )


def _measure_text(
    draft: Eagle3DraftModel, text: _Text, ids: tuple[int, ...], row_of: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Right or wrong and log-probability at each place, for the first token and, where that is right, the second."""
    device, like = draft.d2t.device, draft.lm_head.weight
    features = torch.cat([text.states[i].to(like) for i in ids], dim=-1)
    tokens, answers = text.ids.to(device), text.answers.to(device)
    embeds = _embeddings(draft, text, tokens)
    cache = DynamicCache()
    # Slot t: feature of token t, embedding of token t+1; it predicts token t+2.
    out = draft(features[:, :-1], inputs_embeds=embeds[:, 1:], cache=cache)
    right, scores = _compare(draft, out.logits[0], answers[1:], row_of)
    firsts = right[text.start :], scores[text.start :].double()
    places = torch.arange(len(right) - 1, device=device)
    follows = right[:-1] & (tokens[0, 2:] == answers[1:-1]) & (places >= text.start)
    places = places[follows]
    if not len(places):
        return (*firsts, right[:0], scores[:0].double())
    logits = _second_step(draft, out.last_hidden_state, embeds, places, cache)
    right, scores = _compare(draft, logits, answers[places + 2], row_of)
    return (*firsts, right, scores.double())


def _compare(
    draft: Eagle3DraftModel, logits: torch.Tensor, answers: torch.Tensor, row_of: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each place's likeliest token is the answer, and the answer's log-probability (NaN: not in the head)."""
    known = row_of[answers]
    scores = logits.float().log_softmax(dim=-1).gather(1, known.clamp(min=0)[:, None])[:, 0]
    return draft.draft_to_target(logits.argmax(dim=-1)) == answers, scores.masked_fill(known < 0, float("nan"))


def _second_step(
    draft: Eagle3DraftModel,
    states: torch.Tensor,
    embeds: torch.Tensor,
    places: torch.Tensor,
    cache: DynamicCache,
) -> torch.Tensor:
    """Logits `[places, Vd]` of the recurrent step at every place in one pass: each sees its own past and itself."""
    count, length = len(places), states.shape[1]
    slots = torch.arange(length, device=places.device)
    seen = torch.cat((slots <= places[:, None], torch.eye(count, dtype=torch.bool, device=places.device)), dim=1)
    mask = torch.zeros(seen.shape, dtype=states.dtype, device=states.device)
    mask = mask.masked_fill(~seen, torch.finfo(states.dtype).min)[None, None]
    return draft(
        states[:, places],
        inputs_embeds=embeds[:, places + 2],
        position_ids=(places + 1)[None],
        attention_mask=mask,
        cache=cache,
        recurrent=True,
    ).logits[0]


def _embeddings(draft: Eagle3DraftModel, text: _Text, tokens: torch.Tensor) -> torch.Tensor:
    table = draft.get_input_embeddings()
    made = text.embeds if table is None else table(tokens)
    return made.to(draft.lm_head.weight)
