"""A language model small enough to be known exactly, and speculation over it for many thousands of texts at once.

The model is a table: raw logits for every text of up to `DEPTH` tokens over `VOCAB`, after a fixed prompt. Processors
are applied to every entry once, with its own text as `input_ids`, so even a repetition penalty is exact and fast.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import scipy.stats
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle3_hf.decoding.rejection import rejection_sample
from eagle3_hf.decoding.rejection_tree import accept_children, select_sampled
from eagle3_hf.decoding.tree import chain, from_parents
from eagle3_hf.decoding.verification import accept, select_tokens

VOCAB, DEPTH, PROMPT = 5, 4, (1, 3)
TEXTS = sum(VOCAB**depth for depth in range(DEPTH + 1))
PROCESSORS = ("none", "top_k", "top_p", "min_p", "repetition")
TEMPERATURES = (0.5, 1.0, 1.5)


def child(text: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Number of the text that is `text` and then `token`; the empty text is 0."""
    return text * VOCAB + 1 + token


def processors(name: str, temperature: float) -> LogitsProcessorList:
    """As `generate()` orders them: penalties, temperature, then the cuts."""
    chosen = {
        "none": [],
        "top_k": [TopKLogitsWarper(3)],
        "top_p": [TopPLogitsWarper(0.8)],
        "min_p": [MinPLogitsWarper(0.25)],
        "repetition": [],
    }[name]
    before = [RepetitionPenaltyLogitsProcessor(2.0)] if name == "repetition" else []
    return LogitsProcessorList([*before, TemperatureLogitsWarper(temperature), *chosen])


def raw_table(seed: int, near: torch.Tensor | None = None) -> torch.Tensor:
    """Random logits `[TEXTS, VOCAB]`; a draft's are `near` the target's."""
    noise = torch.randn(TEXTS, VOCAB, generator=torch.Generator().manual_seed(seed))
    return 1.5 * noise if near is None else near + noise


def process(raw: torch.Tensor, steps: LogitsProcessorList) -> torch.Tensor:
    """Processed scores of every text."""
    out, start = [], 0
    for depth in range(DEPTH + 1):
        texts = list(itertools.product(range(VOCAB), repeat=depth))
        ids = torch.tensor([PROMPT + text for text in texts])
        out.append(steps(ids, raw[start : start + len(texts)].clone()))
        start += len(texts)
    return torch.cat(out)


def exact(scores: torch.Tensor, length: int) -> torch.Tensor:
    """Probability of each text of `length` tokens, `[VOCAB ** length]`."""
    probs = scores.softmax(-1).double()
    texts, mass = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.double)
    for _ in range(length):
        mass = (mass[:, None] * probs[texts]).flatten()
        texts = child(texts[:, None], torch.arange(VOCAB)).flatten()
    return mass


@dataclass
class Tables:
    """What a sampler is told: target scores, the q that drafts are drawn from, and the q it is told of."""

    target: torch.Tensor
    drawn: torch.Tensor
    told: torch.Tensor


Method = Callable[[Tables, torch.Tensor], torch.Tensor]


def _draw(probs: torch.Tensor, count: int = 1) -> torch.Tensor:
    """`count` tokens without replacement, in the order of drawing: `[..., count]`."""
    clocks = -torch.log1p(-torch.rand_like(probs)) / probs
    return clocks.topk(count, dim=-1, largest=False).indices


def chain_round(tables: Tables, texts: torch.Tensor, sampled: bool, drafts: int = 2) -> torch.Tensor:
    """One round with a chain: new tokens `[batch, drafts + 1]`, -1 behind the last."""
    at, tokens = [texts], []
    for _ in range(drafts):
        q = tables.drawn[at[-1]]
        tokens.append(_draw(q)[:, 0] if sampled else q.argmax(-1))
        at.append(child(at[-1], tokens[-1]))
    scores = torch.stack([tables.target[text] for text in at], 1)
    told = torch.stack([tables.told[text] for text in at[:-1]], 1) if sampled else None
    return rejection_sample(torch.stack(tokens, 1), scores, told)


def tree_round(tables: Tables, texts: torch.Tensor, sampled: bool) -> torch.Tensor:
    """One round with a tree: two children at each of two levels."""
    parents, depths = [0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2, 2]
    at, tokens = [texts], [torch.zeros_like(texts)]
    for parent in range(3):
        q = tables.drawn[at[parent]]
        for token in (_draw(q, 2) if sampled else q.topk(2).indices).unbind(1):
            tokens.append(token)
            at.append(child(at[parent], token))
    batch = texts.shape[0]
    shape = [torch.tensor(values).expand(batch, -1) for values in (parents, depths)]
    tree = from_parents(torch.stack(tokens, 1), shape[0], shape[1], 2)
    scores = torch.stack([tables.target[text] for text in at], 1)
    if sampled:
        selected = select_sampled(tree, scores.softmax(-1), tables.told[torch.stack(at, 1)], 2)
    else:
        selected = select_tokens(scores, do_sample=True)
    outcome = accept(tree, selected)
    return torch.where(torch.arange(3) <= outcome.counts[:, None], outcome.tokens, -1)


def candidates_round(tables: Tables, texts: torch.Tensor, replacement: bool, sampled: bool) -> torch.Tensor:
    """One round with three candidates for the next token alone."""
    q = tables.drawn[texts]
    if not sampled:
        children = q.topk(3).indices
    elif replacement:
        children = torch.cat([_draw(q) for _ in range(3)], 1)
    else:
        children = _draw(q, 3)
    p = tables.target[texts].softmax(-1)
    noise = -torch.log1p(-torch.rand_like(p))
    told = tables.told[texts] if sampled else None
    return accept_children(p, children, told, torch.rand(children.shape), noise, replacement)[0][:, None]


def selection_chain_round(tables: Tables, texts: torch.Tensor) -> torch.Tensor:
    """One round with a deterministic chain and one draw at every node."""
    at, tokens = [texts], [torch.zeros_like(texts)]
    for _ in range(2):
        tokens.append(tables.drawn[at[-1]].argmax(-1))
        at.append(child(at[-1], tokens[-1]))
    scores = torch.stack([tables.target[text] for text in at], 1)
    outcome = accept(chain(torch.stack(tokens, 1)), select_tokens(scores, do_sample=True))
    return torch.where(torch.arange(3) <= outcome.counts[:, None], outcome.tokens, -1)


METHODS: dict[str, Method] = {
    "chain, one-hot q": functools.partial(chain_round, sampled=False),
    "chain, real q": functools.partial(chain_round, sampled=True),
    "chain, selection": selection_chain_round,
    "tree, selection": functools.partial(tree_round, sampled=False),
    "tree, sampled": functools.partial(tree_round, sampled=True),
    "candidates, one-hot q": functools.partial(candidates_round, replacement=False, sampled=False),
    "candidates, without replacement": functools.partial(candidates_round, replacement=False, sampled=True),
    "candidates, with replacement": functools.partial(candidates_round, replacement=True, sampled=True),
}
SAMPLED = [name for name in METHODS if "real q" in name or "sampled" in name or "replacement" in name]


def speculate_texts(method: Method, tables: Tables, draws: int, batch: int, length: int = 3) -> torch.Tensor:
    """`draws` texts of `length` tokens, `[draws, length]`, in calls of `batch` rows that torch runs side by side."""

    def run(texts: torch.Tensor) -> torch.Tensor:
        place = torch.arange(length)
        out = torch.full((batch, length), -1)
        depth = torch.zeros_like(texts)
        for _ in range(length):  # every round gives at least one token
            new = method(tables, texts)
            for j in range(new.shape[1]):
                token = new[:, j]
                goes = (token >= 0) & (depth < length)
                out = torch.where(goes[:, None] & (place == depth[:, None]), token[:, None], out)
                # A full text isn't read any more; 0 keeps its number inside the table.
                texts = torch.where(goes & (depth < length - 1), child(texts, token), torch.where(goes, 0, texts))
                depth = depth + goes
        return out

    start = torch.zeros(draws // batch, batch, dtype=torch.long)
    return torch.vmap(run, randomness="different")(start).flatten(0, 1)


@dataclass
class Fit:
    """How well draws fit a distribution."""

    kl: float
    tv: float
    tv_bound: float
    p_value: float

    @property
    def ok(self) -> bool:
        return self.kl < 0.01 and self.tv < self.tv_bound and self.p_value > 0.01


def chi_squared(seen: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of counts `seen` against `probs`; cells with fewer than five expected counts are put together."""
    seen, probs = seen.double().flatten(), probs.double().flatten()
    expected = probs / probs.sum() * seen.sum()
    large = expected >= 5
    observed, wanted = seen[large].tolist(), expected[large].tolist()
    if float(expected[~large].sum()) >= 5:
        observed.append(float(seen[~large].sum()))
        wanted.append(float(expected[~large].sum()))
    scale = sum(observed) / sum(wanted)
    return float(scipy.stats.chisquare(observed, [value * scale for value in wanted]).pvalue)


def fit(texts: torch.Tensor, expected: torch.Tensor) -> Fit:
    """Compare texts `[draws, length]` with the exact distribution over all of them."""
    number = torch.zeros(len(texts), dtype=torch.long)
    for token in texts.unbind(1):
        number = number * VOCAB + token
    seen = torch.bincount(number, minlength=len(expected)).double()
    n = len(texts)
    share = seen / n
    if bool((seen[expected == 0] > 0).any()):
        return Fit(math.inf, math.inf, 0.0, 0.0)  # something impossible came out
    there = seen > 0
    kl = float((share[there] * (share[there] / expected[there]).log()).sum())
    tv = float((share - expected).abs().sum() / 2)
    # Its mean for exact samples is at most this sum, and it exceeds its mean by t with chance exp(-2 n t^2).
    bound = float((expected * (1 - expected) / n).sqrt().sum() / 2) + math.sqrt(math.log(1e4) / (2 * n))
    return Fit(kl, tv, bound, chi_squared(seen, expected))


def make_tables(name: str, temperature: float) -> tuple[Tables, torch.Tensor, torch.Tensor]:
    """Right tables for one setting, and the raw logits of target and draft."""
    raw = raw_table(0)
    raw_draft = raw_table(1, near=raw)
    steps = processors(name, temperature)
    q = process(raw_draft, steps).softmax(-1)
    return Tables(process(raw, steps), q, q), raw, raw_draft


def battery(method: Method, tables: Tables, truth: torch.Tensor, draws: int, batch: int) -> list[Fit]:
    """Fits of the first two tokens and of all three; `truth` holds the scores that the texts should follow.

    A chi-squared p-value is below 0.01 once in a hundred times when all is right, and there are hundreds of fits: a
    setting that fails is drawn once more, with four times as many texts, and that decides.
    """
    fits: list[Fit] = []
    for attempt in range(2):
        texts = speculate_texts(method, tables, draws * 4**attempt, batch)
        fits = [fit(texts[:, :length], exact(truth, length)) for length in (2, 3)]
        if all(one.ok for one in fits):
            break
    return fits
