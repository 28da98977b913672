"""Which reading of a draft is the right one: paired comparisons, and what follows from them in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

# Below this no reading of the draft is right: it predicts no better than common words do.
_HOPELESS = 0.1
# Standard errors. About eight readings are compared, in up to two looks: by chance one in fifty probes gets there.
CERTAIN = 3.0


@dataclass(frozen=True, eq=False)
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
        log_prob: mean log-probability that the draft gives the target's token.
        log_probs: the same for each place, float64 `[places]`, NaN where the draft vocabulary lacks the token.
        second_log_probs: for the second token, float64 `[second_places]`.
    """

    name: str
    ids: tuple[int, ...]
    changes: dict[str, bool]
    first: float
    second: float
    places: int
    second_places: int
    log_prob: float
    log_probs: torch.Tensor = field(repr=False)
    second_log_probs: torch.Tensor = field(repr=False)


@dataclass
class Verdict:
    """All readings, and what follows from them.

    Attributes:
        readings: `as loaded` first.
        best: name of the reading that is right, or `none`.
        text: the verdict in words.
        certain: the best reading is better than every other one by more than chance.
        leads: by how many standard errors each other reading predicts the first token better than `as loaded`.
    """

    readings: list[Reading] = field(default_factory=list)
    best: str = ""
    text: str = ""
    certain: bool = False
    leads: dict[str, float] = field(default_factory=dict)

    @property
    def as_loaded_is_right(self) -> bool:
        return self.best == "as loaded"


def signed_rank(gains: torch.Tensor) -> float:
    """Wilcoxon's signed-rank statistic of paired differences `[n]`, in standard errors; above 0: gains outweigh.

    Ranks instead of the differences themselves: a few wild log-probabilities don't decide. NaN and 0 are left out.
    """
    gains = gains[~gains.isnan() & (gains != 0)]
    if len(gains) < 2:
        return 0.0
    _, place, counts = gains.abs().unique(return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2).to(gains.dtype)[place]
    return float((gains.sign() * ranks).sum() / ranks.pow(2).sum().sqrt())


def lead(reading: Reading, other: Reading) -> float:
    """By how many standard errors `reading` predicts the first token better than `other`, place by place."""
    return signed_rank(reading.log_probs - other.log_probs)


def better(reading: Reading, other: Reading) -> bool:
    """Whether `reading` predicts the first token better than `other`, beyond chance."""
    return lead(reading, other) > CERTAIN


def pick(readings: list[Reading]) -> Reading:
    """The reading that predicts the first token best; each must be better than those before it beyond chance."""
    best = readings[0]
    for reading in readings[1:]:
        # `norm_output` changes nothing before the second token.
        if "norm_output" not in reading.changes and better(reading, best):
            best = reading
    return best


def judge(readings: list[Reading]) -> Verdict:
    """The verdict on `readings`; the first one is the draft as loaded."""
    loaded = readings[0]
    early = [reading for reading in readings if "norm_output" not in reading.changes]
    made = Verdict(readings, leads={reading.name: lead(reading, loaded) for reading in early[1:]})
    best = pick(readings)
    if max(reading.first for reading in early) < _HOPELESS:
        made.best, made.certain = "none", loaded.places > 50
        top = max(early, key=lambda reading: reading.first)
        made.text = (
            f"no reading of this draft predicts the target (best: {top.name}, {top.first:.2f}). Neither aux ids nor "
            "norms are the cause: the draft was trained for another target, its vocabulary map belongs to another "
            "head, or it was never trained"
        )
        return made
    output = _norm_output(readings, best)
    others = [reading for reading in early if reading is not best]
    rivals = [reading for reading in others if not better(best, reading)]
    made.certain = not rivals
    made.best = best.name
    if best is loaded and output is None:
        made.text = _right(loaded, rivals, made.leads)
        return made
    made.text = _wrong(best, loaded, output)
    if output is not None:
        made.best = output.name
    if rivals:
        made.text += f". With so little text {_named(rivals)} can't be told from it: measure more"
    return made


def _norm_output(readings: list[Reading], best: Reading) -> Reading | None:
    """The reading with `norm_output` the other way round, if the second token says that it is right."""
    flipped = next((reading for reading in readings if "norm_output" in reading.changes), None)
    if flipped is None or flipped.second_places != best.second_places:
        return None
    return flipped if signed_rank(flipped.second_log_probs - best.second_log_probs) > CERTAIN else None


def _named(readings: list[Reading]) -> str:
    return " and ".join(f"'{reading.name}'" for reading in readings)


def _right(loaded: Reading, rivals: list[Reading], leads: dict[str, float]) -> str:
    text = (
        f"the draft is read right: as loaded its first token is the target's at {loaded.first:.2f} of {loaded.places} "
        "places, and no other reading is better than chance allows"
    )
    if not rivals:
        nearest = max(leads.values(), default=-math.inf)
        return text + f" (it is better than each by at least {-nearest:.1f} standard errors)" if leads else text
    ahead = [reading for reading in rivals if leads[reading.name] > 0]
    if ahead:
        top = max(ahead, key=lambda reading: leads[reading.name])
        return text + (
            f". That isn't certain: '{top.name}' is ahead by {leads[top.name]:.1f} standard errors, {CERTAIN:.0f} are "
            "more than chance; measure more text"
        )
    return text + f". That isn't certain: {_named(rivals)} can't be told from it; measure more text"


def _wrong(best: Reading, loaded: Reading, output: Reading | None) -> str:
    causes, fixes = [], []
    if best.ids != loaded.ids:
        causes.append("the aux ids are off")
        fixes.append(f"aux_hidden_state_layers={list(best.ids)}")
    changes = best.changes | (output.changes if output is not None else {})
    causes += [f"{name} is read wrong" for name in changes]
    fixes += [f"{name}={value}" for name, value in changes.items()]
    text = f"{' and '.join(causes)}: "
    if best is not loaded:
        text += (
            f"with {best.name} the first token is right at {best.first:.3f} of the places (mean log-probability "
            f"{best.log_prob:.3f}), as loaded at {loaded.first:.3f} ({loaded.log_prob:.3f}), better by "
            f"{lead(best, loaded):.1f} standard errors. "
        )
    if output is not None:
        text += f"With {output.name} the second token is right at {output.second:.2f} of the places"
        text += f", as loaded at {loaded.second:.2f}. " if best is loaded else ". "
    return text + f"Load it with {', '.join(fixes)}"
