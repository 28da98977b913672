"""Rejection samplers for chains: which drafted tokens stay, and which token follows them.

The rule is that of Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): a draft token `x`, drawn
from `q`, stays with probability `min(1, p(x) / q(x))`; at the first one that doesn't, the token comes from the
residual `(p - q)+`, normalised; when all stay, one more token comes from `p`. What comes out is distributed as `p`,
whatever `q` is. Two special cases are the same rule: a draft that always proposes the same token there has a one-hot
`q`, and a greedy row has a one-hot `p`.

Everything here is batch first, free of host synchronisation, of shapes that depend on values, and of `cumprod`,
`nonzero` and boolean indexing, so it compiles as one graph and lowers to XLA. Randomness may be passed in ([`Draws`]),
which makes a sampler a pure function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .metadata import SpeculationMetadata

PLACEHOLDER = -1
_TINY = torch.finfo(torch.float32).tiny


@dataclass
class Draws:
    """The random numbers of one sampler call.

    Attributes:
        uniforms: float32 `[batch, K]` in `[0, 1)`, one for each decision to keep a draft token.
        exponentials: float32 `[batch, vocab]`, unit-rate, for the one token of each row that isn't a draft token.
    """

    uniforms: torch.Tensor
    exponentials: torch.Tensor

    @classmethod
    def make(
        cls,
        batch: int,
        drafts: int,
        vocab: int,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> Draws:
        """Fresh draws from torch's generator (or `generator`)."""
        uniforms = torch.rand(batch, drafts, device=device, generator=generator)
        # Made from uniforms: `exponential_` isn't available everywhere. 1 - u is in (0, 1], so the log is finite.
        exponentials = -torch.log1p(-torch.rand(batch, vocab, device=device, generator=generator))
        return cls(uniforms, exponentials)

    def check(self, batch: int, drafts: int, vocab: int) -> None:
        """Refuse other shapes (`ValueError`): they would broadcast, and rows or tokens share their numbers."""
        for name, shape in (("uniforms", (batch, drafts)), ("exponentials", (batch, vocab))):
            if getattr(self, name).shape != shape:
                raise ValueError(f"draws.{name} must be {list(shape)}, got {list(getattr(self, name).shape)}")


def _check_rows(name: str, values: torch.Tensor | None, batch: int, dtype: torch.dtype | None = None) -> None:
    if values is None:
        return
    if not isinstance(values, torch.Tensor) or values.shape != (batch,) or values.dtype != (dtype or values.dtype):
        kind = f"{values.dtype} {list(values.shape)}" if isinstance(values, torch.Tensor) else repr(values)
        wanted = "" if dtype is None else f"{dtype} "
        raise ValueError(f"{name} must be a {wanted}tensor with a value for each row, [{batch}], got {kind}")


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """`(p - q)+`, the distribution of the token after a rejection, not normalised.

    Where it is zero everywhere (`p` equals `q`, so a rejection was due to rounding alone) `p` stands in.

    Args:
        target_probs, draft_probs: float `[..., vocab]`.
    """
    left = (target_probs - draft_probs).clamp(min=0)
    return torch.where(left.amax(dim=-1, keepdim=True) > 0, left, target_probs)


def remove_token(probs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The residual for a one-hot `q`: `probs` `[..., vocab]` without `tokens` `[...]` (-1 removes nothing)."""
    vocab = torch.arange(probs.shape[-1], device=probs.device)
    left = torch.where(vocab == tokens[..., None], 0.0, probs)
    return torch.where(left.amax(dim=-1, keepdim=True) > 0, left, probs)


def race(weights: torch.Tensor, exponentials: torch.Tensor) -> torch.Tensor:
    """Draw an index with probability proportional to `weights` `[..., vocab]`: the first of exponential clocks.

    The same as adding Gumbel noise to the logarithms and taking the argmax, without a logarithm of zero.
    """
    return (weights / exponentials.clamp(min=_TINY)).argmax(dim=-1)


def _first_rejected(rejected: torch.Tensor) -> torch.Tensor:
    """int64 `[batch]`: place of the first True of bool `[batch, K]`, `K` where there is none."""
    drafts = rejected.shape[1]
    if drafts == 0:
        return rejected.new_zeros(rejected.shape[0], dtype=torch.long)
    # A minimum instead of the usual cumulative product, which XLA backends lower badly.
    place = torch.arange(drafts, device=rejected.device)
    return torch.where(rejected, place, drafts).amin(dim=1)


def greedy_rejection(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> torch.Tensor:
    """Keep draft tokens as long as they are the target's own choice.

    Args:
        draft_tokens: int64 `[batch, K]`, -1 behind a row's last draft token.
        target_tokens: int64 `[batch, K + 1]`, the target's argmax before each draft token and after the last.

    Returns:
        int64 `[batch, K + 1]`: accepted tokens, the target's token at the first mismatch (or the bonus), then -1.
    """
    count = _first_rejected(draft_tokens != target_tokens[:, : draft_tokens.shape[1]])
    place = torch.arange(target_tokens.shape[1], device=target_tokens.device)
    return torch.where(place <= count[:, None], target_tokens, PLACEHOLDER)


def rejection_sample(
    draft_tokens: torch.Tensor,
    scores: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    greedy: bool | torch.Tensor = False,
    draws: Draws | None = None,
) -> torch.Tensor:
    """The one interface for padded chains: greedy, one-hot `q`, real `q`, and batches that mix greedy and random rows.

    Args:
        draft_tokens: int64 `[batch, K]`, -1 behind a row's last draft token.
        scores: float `[batch, K + 1, vocab]`, **processed** target logits before each draft token and after the last
            (behind a row's last draft token they mean nothing).
        draft_probs: float `[batch, K, vocab]`, the distributions that the draft tokens were drawn from, after all
            processing of the draft's logits; `None` where the draft is deterministic (one-hot). A token to which they
            give no probability counts as no draft.
        greedy: True or False for all rows, or bool `[batch]`.
        draws: random numbers; `None` draws them from torch's generator. Not read when `greedy` is True.

    Returns:
        int64 `[batch, K + 1]`: accepted tokens, then the recovered or bonus token, then -1.

    Raises:
        ValueError: shapes don't fit each other.
    """
    if draft_tokens.dim() != 2 or scores.dim() != 3:
        raise ValueError(f"draft_tokens must be [batch, K] and scores [batch, K + 1, vocab], "
                         f"got {list(draft_tokens.shape)} and {list(scores.shape)}")  # fmt: skip
    batch, drafts = draft_tokens.shape
    if scores.shape[:2] != (batch, drafts + 1):
        raise ValueError(f"{drafts} draft tokens in {batch} rows need scores [{batch}, {drafts + 1}, vocab], "
                         f"got {list(scores.shape)}")  # fmt: skip
    if draft_probs is not None and draft_probs.shape != (batch, drafts, scores.shape[2]):
        raise ValueError(f"draft_probs must be [{batch}, {drafts}, {scores.shape[2]}], got {list(draft_probs.shape)}")
    if greedy is True:
        return greedy_rejection(draft_tokens, scores.argmax(dim=-1))
    vocab, device = scores.shape[2], scores.device
    if draws is None:
        draws = Draws.make(batch, drafts, vocab, device)
    draws.check(batch, drafts, vocab)
    probs = target_probabilities(scores, greedy)
    at = draft_tokens.clamp(min=0)[..., None]
    wanted = probs[:, :drafts].gather(2, at)[..., 0]
    real = draft_tokens >= 0
    offered = torch.ones_like(wanted)
    if draft_probs is not None:
        offered = draft_probs.gather(2, at)[..., 0]
        # Nothing of probability zero is ever drawn from q: such a token is no draft, and isn't let through by p/0.
        real = real & (offered > 0)
    # Strictly below: a token that the target never takes must not pass on a uniform of exactly zero.
    count = _first_rejected(~(draws.uniforms * offered < wanted) | ~real)
    last = count[:, None, None].expand(-1, 1, vocab)
    left = probs.gather(1, last)[:, 0]
    nothing = draft_tokens.new_full((batch, 1), PLACEHOLDER)
    refused = torch.cat((torch.where(real, draft_tokens, PLACEHOLDER), nothing), dim=1).gather(1, count[:, None])
    if draft_probs is None:
        left = remove_token(left, refused[:, 0])
    else:
        # A row whose drafts all stayed has no refused token, and then the residual of q = 0 is p.
        q = torch.cat((draft_probs, draft_probs.new_zeros(batch, 1, vocab)), dim=1).gather(1, last)[:, 0]
        left = residual(left, torch.where(refused >= 0, q, 0.0))
    token = race(left, draws.exponentials)
    place = torch.arange(drafts + 1, device=device)
    kept = torch.cat((draft_tokens, nothing), dim=1)
    out = torch.where(place == count[:, None], token[:, None], PLACEHOLDER)
    return torch.where(place < count[:, None], kept, out)


def target_probabilities(scores: torch.Tensor, greedy: bool | torch.Tensor = False) -> torch.Tensor:
    """float32 `softmax(scores)` `[batch, ..., vocab]`, one-hot at the argmax in greedy rows (bool or `[batch]`)."""
    if greedy is False:
        return scores.float().softmax(dim=-1)
    vocab = torch.arange(scores.shape[-1], device=scores.device)
    onehot = (vocab == scores.argmax(dim=-1, keepdim=True)).float()
    if greedy is True:
        return onehot
    _check_rows("greedy", greedy, scores.shape[0], torch.bool)
    rows = greedy.view(-1, *[1] * (scores.dim() - 1))
    return torch.where(rows, onehot, scores.float().softmax(dim=-1))


def pad_flat(values: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    """Rows of a flat tensor side by side.

    Args:
        values: `[total, ...]`.
        starts, counts: int64 `[batch]`, where each row begins in `values` and how many entries it has.
        width: entries of the result; longer rows are cut.
        fill: what stands behind a row's last entry.

    Returns:
        `[batch, width, ...]`.
    """
    place = torch.arange(width, device=values.device)
    if values.shape[0] == 0:
        return values.new_full((starts.shape[0], width, *values.shape[1:]), fill)
    index = (starts[:, None] + place).clamp(max=values.shape[0] - 1)
    there = (place < counts[:, None]).view(*index.shape, *[1] * (values.dim() - 1))
    return torch.where(there, values[index], fill)


def rejection_sample_flat(
    metadata: SpeculationMetadata,
    scores: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    greedy: bool | torch.Tensor = False,
    draws: Draws | None = None,
    draft_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`rejection_sample`] for a flat batch, in which rows lie behind one another and draft different numbers.

    Args:
        metadata: of this batch.
        scores: float `[drafts + batch, vocab]`, processed target logits at `metadata.logits_indices`.
        draft_probs: float `[drafts, vocab]`, or `None` for a deterministic draft.
        greedy, draws: as there.
        draft_tokens: int64 `[drafts]`; default `metadata.draft_token_ids`.

    Returns:
        int64 `[batch, max_spec_len + 1]`, as there.

    Raises:
        ValueError: no draft tokens, neither here nor in `metadata`; shapes that aren't this batch's.
    """
    tokens = metadata.draft_token_ids if draft_tokens is None else draft_tokens
    if tokens is None:
        raise ValueError("draft tokens are needed: build the metadata with input_ids, or pass draft_tokens")
    drafts, needed = metadata.target_logits_indices.shape[0], metadata.logits_indices.shape[0]
    if tokens.shape != (drafts,):
        raise ValueError(f"draft_tokens must be [{drafts}], as the metadata says, got {list(tokens.shape)}")
    if scores.dim() != 2 or scores.shape[0] != needed:
        raise ValueError(f"scores must be [{needed}, vocab], those at metadata.logits_indices, "
                         f"got {list(scores.shape)}")  # fmt: skip
    if draft_probs is not None and draft_probs.shape != (drafts, scores.shape[1]):
        raise ValueError(f"draft_probs must be [{drafts}, {scores.shape[1]}], got {list(draft_probs.shape)}")
    ends, counts, width = metadata.cu_num_draft_tokens, metadata.num_draft_tokens, metadata.max_spec_len
    starts = ends - counts
    # Each row before this one has one more logit than it has drafts.
    logit_starts = starts + torch.arange(starts.shape[0], device=starts.device)
    padded = pad_flat(tokens, starts, counts, width, PLACEHOLDER)
    rows = pad_flat(scores, logit_starts, counts + 1, width + 1, 0.0)
    probs = None if draft_probs is None else pad_flat(draft_probs, starts, counts, width, 0.0)
    return rejection_sample(padded, rows, probs, greedy, draws)


def warp_rows(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Temperature, top-k and top-p with a value for each row, in that order, as transformers' warpers do each.

    Args:
        scores: float `[batch, ..., vocab]`.
        temperature: float `[batch]`; 0 marks a greedy row, whose scores stay as they are.
        top_k: int64 `[batch]`; 0 keeps all.
        top_p: float `[batch]`; 1 keeps all.

    Returns:
        float32 `[batch, ..., vocab]`, dropped tokens at -inf.

    Raises:
        ValueError: not a tensor with a value for each row.
    """
    for name, values in (("temperature", temperature), ("top_k", top_k), ("top_p", top_p)):
        _check_rows(name, values, scores.shape[0], torch.long if name == "top_k" else None)
    shape = (-1, *[1] * (scores.dim() - 1))
    scores = scores.float() / torch.where(temperature == 0, 1.0, temperature).view(shape)
    if top_k is None and top_p is None:
        return scores
    vocab = scores.shape[-1]
    if top_k is not None:
        descending = scores.sort(dim=-1, descending=True).values
        last = torch.where(top_k <= 0, vocab, top_k).clamp(max=vocab).view(shape) - 1
        # By value, so that ties with the k-th stay, as with transformers' TopKLogitsWarper.
        threshold = descending.gather(-1, last.expand(*scores.shape[:-1], 1))
        scores = torch.where(scores < threshold, float("-inf"), scores)
    if top_p is not None:
        ascending, order = scores.sort(dim=-1)
        below = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p.view(shape)
        # The likeliest token always stays, and a row with top_p = 1 keeps all, whatever the rounding of the sum.
        rank = torch.arange(vocab, device=scores.device)
        below = below & (rank < vocab - 1) & (top_p.view(shape) < 1)
        dropped = torch.zeros_like(below).scatter(-1, order, below)
        scores = torch.where(dropped, float("-inf"), scores)
    return scores
