"""Speculative decoding with two models, as published: short enough to check by eye. The package's loop isn't this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _distributions(model: Callable[..., Any], tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Next-token distribution after every prefix of `tokens` `[1, n]`: float32 `[n, vocab]`."""
    out = model(tokens)
    logits = getattr(out, "logits", out)[0].float()
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(dim=-1)


@torch.no_grad()
def speculative_decode(
    target: Callable[..., Any],
    draft: Callable[..., Any],
    prompt: torch.Tensor,
    num_assistant_tokens: int = 4,
    temperature: float = 1.0,
    max_new_tokens: int = 32,
    eos_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The rule of Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv 2302.01318).

    No cache, no batch, no processors but the temperature: a reference for tests and readers. The result is distributed
    as the target's own sampling; at temperature 0 it is the target's greedy text.

    Args:
        target, draft: Hugging Face models, or functions from int64 `[1, n]` tokens to `[1, n, vocab]` logits. Both
            have the same vocabulary.
        prompt: int64 `[1, n]`, at least one token.
        num_assistant_tokens: tokens drafted a round.
        temperature: of both models; 0 is greedy.
        max_new_tokens: tokens to add, unless `eos_token_id` comes first.
        eos_token_id: ends the text.
        generator: for the random numbers.

    Returns:
        int64 `[1, n + new]`.

    Raises:
        ValueError: not exactly one row, an empty prompt, a number of draft tokens below 1, a negative number of new
            tokens, a temperature that is negative or no number, several EOS tokens, or different vocabularies.
    """
    if prompt.dim() != 2 or prompt.shape[0] != 1 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [1, n] with n >= 1, got {list(prompt.shape)}")
    if num_assistant_tokens < 1:
        raise ValueError(f"num_assistant_tokens must be at least 1, got {num_assistant_tokens}")
    if max_new_tokens < 0 or not 0 <= temperature < float("inf"):
        raise ValueError(
            f"max_new_tokens and temperature must be 0 or more, got max_new_tokens {max_new_tokens}, "
            f"temperature {temperature}"
        )
    if isinstance(eos_token_id, (list, tuple, set)):
        raise ValueError(f"the reference knows one eos_token_id, got {eos_token_id}")

    def draw(weights: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(weights, 1, generator=generator)

    tokens, end = prompt, prompt.shape[1] + max_new_tokens
    while tokens.shape[1] < end:
        length = tokens.shape[1]
        # 1. The draft writes a few tokens, one forward each, and we remember what it drew them from.
        drafted, q = tokens, []
        for _ in range(min(num_assistant_tokens, end - length)):
            q.append(_distributions(draft, drafted, temperature)[-1])
            drafted = torch.cat((drafted, draw(q[-1])[None]), dim=1)
        # 2. One target forward judges them all: p[i] is what the target would have drawn the i-th one from.
        p = _distributions(target, drafted, temperature)[length - 1 :]
        if p.shape[-1] != q[0].shape[-1]:
            raise ValueError(f"the target has {p.shape[-1]} tokens, the draft {q[0].shape[-1]}: they must be the same")
        new: list[torch.Tensor] = []
        for i, x in enumerate(drafted[0, length:]):
            # 3. Keep the token with probability min(1, p/q).
            if torch.rand((), generator=generator) * q[i][x] < p[i][x]:
                new.append(x[None])
                continue
            # 4. At the first one that isn't kept, draw from what p has more of than q; the rest is thrown away.
            left = (p[i] - q[i]).clamp(min=0)
            # Nothing is left where p equals q and only rounding rejected.
            new.append(draw(left if left.any() else p[i]))
            break
        else:
            # 5. All were kept: the target's last distribution gives one more token for free.
            new.append(draw(p[-1]))
        for token in new[: end - length]:
            tokens = torch.cat((tokens, token[None]), dim=1)
            if int(token) == eos_token_id:
                return tokens
    return tokens
