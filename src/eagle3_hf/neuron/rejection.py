"""On-device choice and rejection: which drafted tokens the target would have written itself."""

from __future__ import annotations

import torch

REJECTED = -1


def draw(
    logits: torch.Tensor, likeliest: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """One token for each place, drawn with the host's random numbers.

    Drawing is by inverting the cumulative distribution, so the same numbers give the same tokens on every backend.

    Args:
        logits: `[batch, n, vocab]`.
        likeliest: int32 `[batch, n]`, the token of greedy rows.
        temperature: float32 `[batch]`; 0 is greedy for that row.
        uniforms: float32 `[batch, n]` in `[0, 1)`.

    Returns:
        int32 `[batch, n]`.
    """
    heat = temperature[:, None, None]
    greedy = heat <= 0
    probabilities = (logits.float() / torch.where(greedy, torch.ones_like(heat), heat)).softmax(dim=-1)
    heights = probabilities.cumsum(dim=-1)
    # The last height may miss 1 by rounding: scaling by it keeps the draw inside the vocabulary.
    drawn = (heights <= uniforms[..., None] * heights[..., -1:]).sum(dim=-1).clamp(max=logits.shape[-1] - 1)
    return torch.where(greedy[..., 0], likeliest, drawn.to(torch.int32))


def reject(drafts: torch.Tensor, chosen: torch.Tensor, allowed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drafted tokens up to the first that isn't the target's own choice.

    For a draft that proposes one fixed token a place this is exact for sampling as well: a token is kept with just
    the probability that the target gives it.

    Args:
        drafts: int32 `[batch, K]`.
        chosen: int32 `[batch, 1 + K]`, the target's token after the root and after each draft.
        allowed: bool `[batch, K]`, false where a draft has no place in memory; it then counts as rejected.

    Returns:
        int32 `[batch, 1 + K]`: the new tokens (kept drafts, then the target's own one), `-1` behind them; and
        int32 `[batch]`, how many there are.
    """
    wrong = ((drafts != chosen[:, :-1]) | ~allowed).to(torch.int32)
    kept = (wrong.cumsum(dim=1) == 0).sum(dim=1, keepdim=True)
    places = torch.arange(chosen.shape[1], device=chosen.device)
    out = torch.where(places <= kept, chosen, torch.full_like(chosen, REJECTED))
    return out, (kept[:, 0] + 1).to(torch.int32)
