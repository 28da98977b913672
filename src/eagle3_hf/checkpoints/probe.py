"""Is the draft read right? Measures acceptance for neighbouring aux ids and other norm variants on real text.

A draft that is read with its ids off by one, or with a norm too many, still runs; it is only wrong more often. So
each reading is tried on the same text, and the numbers say which one the draft was trained with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from ..aux_layers import find_decoder
from ..modeling_eagle3 import Eagle3DraftModel

# Below this no reading of the draft is right: it predicts no better than common words do.
_HOPELESS = 0.1
_STEPS_PER_TEXT = 8
# Standard errors: six readings are compared, so two would be reached by chance too often.
_CERTAIN, _SUSPICIOUS = 3.0, 1.5


@dataclass(frozen=True)
class Reading:
    """One way to read the draft, and how well it predicts.

    Attributes:
        name: `as loaded`, or what is different.
        ids: aux ids.
        changes: config fields that differ.
        first: share of places where the draft's first token is the target's.
        second: the same for its second token, where the first was right.
        places: how many places `first` was measured at.
        second_places: how many places `second` was measured at.
        log_prob: mean log-probability that the draft gives the target's token; tells readings apart long before the
            shares do.
        log_probs: the same for each place whose token the draft vocabulary has.
        right: for each place, whether the first token was right.
    """

    name: str
    ids: tuple[int, ...]
    changes: dict[str, bool]
    first: float
    second: float
    places: int
    second_places: int
    log_prob: float
    log_probs: tuple[float, ...] = field(repr=False)
    right: tuple[bool, ...] = field(repr=False)


@dataclass
class Verdict:
    """All readings, and what follows from them."""

    readings: list[Reading] = field(default_factory=list)
    best: str = ""
    text: str = ""

    @property
    def as_loaded_is_right(self) -> bool:
        return self.best == "as loaded"


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
    offsets: Sequence[int] = (-2, -1, 1, 2),
) -> Verdict:
    """Measure the draft as loaded and every other reading of it.

    Args:
        target: a model with [`Eagle3TargetMixin`].
        draft: its draft.
        prompts: int64 `[1, sequence]` each; the target continues them greedily.
        new_tokens: length of each continuation.
        offsets: what to add to all aux ids.

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
    wanted = [ids] + [tuple(i + offset for i in ids) for offset in offsets]
    wanted = [each for each in wanted if min(each) >= 0 and max(each) <= depth]
    texts = [_continue(target, prompt, sorted({i for each in wanted for i in each}), new_tokens) for prompt in prompts]
    verdict = Verdict([_measure(draft, texts, ids, "as loaded", {})])
    for each in wanted[1:]:
        verdict.readings.append(_measure(draft, texts, each, f"aux ids {each[0] - ids[0]:+d}", {}))
    best = max(verdict.readings, key=lambda reading: reading.log_prob)
    best_ids = best.ids if _better(best, verdict.readings[0]) else ids
    for name in ("norm_before_residual", "norm_output"):
        if name == "norm_output" and not draft.config.final_norm:
            continue
        flipped = {name: not getattr(draft.config, name)}
        with _changed(draft, flipped):
            label = f"{name} {'on' if flipped[name] else 'off'}"
            if best_ids != ids:
                label += f", aux ids {best_ids[0] - ids[0]:+d}"
            verdict.readings.append(_measure(draft, texts, best_ids, label, flipped))
    _judge(verdict, ids)
    return verdict


def _continue(target: Any, prompt: torch.Tensor, ids: list[int], new_tokens: int) -> _Text:
    full = target.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new_tokens
    )
    with target.capture_aux_hidden_states(ids) as capture:
        logits = target(input_ids=full, attention_mask=torch.ones_like(full), use_cache=False).logits
    states = dict(zip(ids, capture.take()))
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
    first: list[bool] = []
    second: list[bool] = []
    log_probs: list[float] = []
    row_of = torch.full((draft.config.vocab_size,), -1, device=draft.d2t.device)
    rows = torch.arange(draft.config.draft_vocab_size, device=draft.d2t.device)
    row_of[draft.draft_to_target(rows)] = rows
    for text in texts:
        features = torch.cat([text.states[i] for i in ids], dim=-1).to(draft.fc.weight)
        tokens = text.ids.to(features.device)
        embeds = _embeddings(draft, text, tokens)
        # Slot t: feature of token t, embedding of token t+1; it predicts token t+2.
        logits = draft(features[:, :-1], inputs_embeds=embeds[:, 1:]).logits[0]
        answers = text.answers.to(features.device)
        right = draft.draft_to_target(logits.argmax(dim=-1)) == answers[1:]
        places = range(text.start, len(right))
        first += [bool(right[t]) for t in places]
        known = row_of[answers[1:]]
        scores = logits.float().log_softmax(dim=-1).gather(1, known.clamp(min=0)[:, None])[:, 0]
        log_probs += scores[text.start :][known[text.start :] >= 0].tolist()
        # The second token needs its own short pass for each place, so only some places are taken.
        able = [t for t in places if right[t] and t + 2 < tokens.shape[1]]
        for t in able[:: max(1, len(able) // _STEPS_PER_TEXT)]:
            if int(tokens[0, t + 2]) == int(answers[t + 1]):
                second.append(_second(draft, features, embeds, t, answers))
    mean = sum(log_probs) / max(len(log_probs), 1)
    return Reading(
        name, ids, changes, _share(first), _share(second), len(first), len(second), mean, tuple(log_probs), tuple(first)
    )


def _second(
    draft: Eagle3DraftModel, features: torch.Tensor, embeds: torch.Tensor, t: int, answers: torch.Tensor
) -> bool:
    cache = DynamicCache()
    initial = draft(features[:, : t + 1], inputs_embeds=embeds[:, 1 : t + 2], cache=cache, logits_to_keep=None)
    state = initial.last_hidden_state[:, -1:]
    out = draft(state, inputs_embeds=embeds[:, t + 2 : t + 3], cache=cache, recurrent=True)
    return int(draft.draft_to_target(out.logits[0, -1].argmax())) == int(answers[t + 2])


def _embeddings(draft: Eagle3DraftModel, text: _Text, tokens: torch.Tensor) -> torch.Tensor:
    table = draft.get_input_embeddings()
    made = text.embeds if table is None else table(tokens)
    return made.to(draft.fc.weight)


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0


def _noise(share: float, places: int) -> float:
    """Two standard errors of a share: less than that is chance."""
    share = min(max(share, 0.05), 0.95)
    return 2 * math.sqrt(share * (1 - share) / max(places, 1))


def _lead(reading: Reading, other: Reading) -> float:
    """By how many standard errors `reading` is better than `other`, place by place.

    Probabilities tell near readings apart, right and wrong tokens survive a few wild probabilities: the clearer counts.
    """

    def paired(mine: tuple, theirs: tuple) -> float:
        gains = torch.tensor(mine, dtype=torch.double) - torch.tensor(theirs, dtype=torch.double)
        if len(gains) < 2 or not gains.any():
            return 0.0
        return float(gains.mean() / (gains.std() / math.sqrt(len(gains))).clamp(min=1e-9))

    return max(paired(reading.log_probs, other.log_probs), paired(reading.right, other.right))


def _better(reading: Reading, other: Reading) -> bool:
    return _lead(reading, other) > _CERTAIN


def _judge(verdict: Verdict, ids: tuple[int, ...]) -> None:
    loaded = verdict.readings[0]
    # `norm_output` changes nothing before the second token, so it is judged by that one alone.
    early = [reading for reading in verdict.readings if "norm_output" not in reading.changes]
    best = max(early, key=lambda reading: reading.log_prob)
    # Shifted ids alone are the simpler explanation, unless a norm adds more than chance does.
    simpler = [reading for reading in early if reading.ids == best.ids and not reading.changes]
    if simpler and not _better(best, simpler[0]):
        best = simpler[0]
    if max(reading.first for reading in early) < _HOPELESS:
        verdict.best = "none"
        verdict.text = (
            f"no reading of this draft predicts the target (best: {best.name}, {best.first:.2f}). Neither aux ids nor "
            "norms are the cause: the draft was trained for another target, its vocabulary map belongs to another "
            "head, or it was never trained"
        )
        return
    if _better(best, loaded):
        verdict.best = best.name
        fixes = [f"aux_hidden_state_layers={list(best.ids)}"] if best.ids != ids else []
        fixes += [f"{name}={value}" for name, value in best.changes.items()]
        cause = "the aux ids are off" if best.ids != ids else f"{next(iter(best.changes))} is read wrong"
        verdict.text = (
            f"{cause}: with {best.name} the first token is right at {best.first:.3f} of the places (mean "
            f"log-probability {best.log_prob:.3f}), as loaded at {loaded.first:.3f} ({loaded.log_prob:.3f}). "
            f"Load it with {', '.join(fixes)}"
        )
        return
    output = next((reading for reading in verdict.readings if "norm_output" in reading.changes), None)
    margin = max(0.1, _noise(loaded.second, loaded.second_places))
    if output is not None and output.ids == ids and output.second - loaded.second > margin:
        verdict.best = output.name
        verdict.text = (
            f"norm_output is read wrong: the second token is right at {output.second:.2f} of the places with "
            f"{output.name}, as loaded at {loaded.second:.2f}. Load it with "
            f"norm_output={output.changes['norm_output']}"
        )
        return
    verdict.best = "as loaded"
    verdict.text = (
        f"the draft is read right: as loaded its first token is the target's at {loaded.first:.2f} of {loaded.places} "
        "places, and no other reading is better than chance allows"
    )
    rival = max(early[1:], key=lambda reading: _lead(reading, loaded), default=loaded)
    if _lead(rival, loaded) > _SUSPICIOUS:
        verdict.text += f". That isn't certain: {rival.name} has {rival.first:.2f}; measure more text"
