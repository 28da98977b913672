"""Sampling whose text doesn't depend on the draft: noise that is a function of seed and position alone.

The Gumbel-max trick draws from `p` by `argmax(log p + g)`. Take `g` from a counter-based generator keyed by (seed,
position), and the token at a position follows from the target and the seed: no draft, a chain, a tree, any batch, all
give the same text. The distribution is the target's, since `g` doesn't know the draft. Daliri, Musco and Suresh
(arXiv 2408.07978) use the same coupling between draft and target.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of `value`."""
    value &= _BITS
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # torch's >> on int64 copies the sign bit; the mask makes it the logical shift that the hash is defined by.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 on int64 of any shape: a bijection in which every bit of `x` moves every other.

    Integer arithmetic modulo 2^64, which is the same on every device.
    """
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def invariant_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab: int) -> torch.Tensor:
    """Standard Gumbel noise as a function of (seed, position, token).

    Args:
        seeds, positions: int64 `[n]`.
        vocab: number of tokens.

    Returns:
        float64 `[n, vocab]`. Its 53 random bits are the same on every device; the two logarithms may differ in their
        last bit between devices, which is far below the rounding of any model's logits.
    """
    keys = mix(mix(seeds + _signed(_GOLDEN)) + positions * _signed(_GOLDEN))
    tokens = torch.arange(1, vocab + 1, device=keys.device) * _signed(_GOLDEN)
    bits = _shifted(mix(keys[:, None] + tokens), 11)
    # (bits + 1/2) / 2^53 lies strictly between 0 and 1, so both logarithms are finite.
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53
    # log1p keeps small exponentials, which decide who wins, at full precision.
    return -torch.log(-torch.log1p(-uniform))


class DrafterInvariantSampling(LogitsProcessor):
    """Draws each token by noise keyed by (seed, position): the same text with any draft or none, in any batch.

    The result has one finite score for each row, so it is the token taken both with `do_sample=True` and with
    `do_sample=False`. It has to see the processed scores, so it stands **last**: `generate()` puts processors that a
    user passes before temperature, top-k and top-p, and targets of this package move this one behind them
    (`runs_last`). With other models use `do_sample=False` and pass the warpers by hand, in front of it.

    A position is the number of tokens of a row's own text, so left padding and the other rows don't matter. Targets of
    this package read the padding from the attention mask; elsewhere call [`for_batch`] for a padded batch.

    Rows that share a seed share the noise: equal prompts get equal texts, and different prompts get texts that are each
    distributed as they should be but aren't independent of each other. Give one seed a row for independent rows, such
    as with `num_return_sequences`.

    Args:
        seed: an integer for all rows, or one for each row of the batch (each returned sequence).
        pads: padding columns in front of each row; set by [`for_batch`].
    """

    runs_last = True

    def __init__(self, seed: int | Sequence[int], pads: Sequence[int] | None = None):
        self.seed = _signed(seed) if isinstance(seed, int) else [_signed(int(value)) for value in seed]
        self.pads = None if pads is None else list(pads)

    def for_batch(self, attention_mask: torch.Tensor | None, repeats: int = 1) -> DrafterInvariantSampling:
        """A copy for prompts with this `[batch, prompt]` mask, each repeated `repeats` times (returned sequences).

        Raises:
            ValueError: a list of more or fewer seeds than rows.
        """
        bound = copy.copy(self)
        bound.pads = None
        if attention_mask is not None:
            rows = attention_mask.shape[0] * repeats
            if isinstance(self.seed, list) and len(self.seed) != rows:
                raise ValueError(f"{len(self.seed)} seeds were given for {rows} rows: give one a row, or one for all")
            zeros = (attention_mask == 0).sum(dim=1)
            bound.pads = zeros.repeat_interleave(repeats).tolist()
        return bound

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """float `[batch, vocab]`: 0 for the token drawn in each row (NaN if there is none), -inf for the others."""
        return self.process_rows(input_ids, scores, list(range(scores.shape[0])))

    def process_rows(self, input_ids: torch.Tensor, scores: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """As a call, for nodes whose rows stand at `rows` in the batch; several nodes may belong to one row.

        Args:
            input_ids: int64 `[n, width]`, each node's text, padding in front included.
            scores: float `[n, vocab]`.
            rows: `n` numbers.

        Raises:
            ValueError: there is no seed, or no padding count, for a row.
        """
        device, vocab = scores.device, scores.shape[-1]
        for what, values in (("seeds", self.seed), ("padding counts", self.pads)):
            if isinstance(values, list) and max(rows) >= len(values):
                raise ValueError(f"row {max(rows)} is asked for, but {len(values)} {what} were given")
        seeds = [self.seed[row] if isinstance(self.seed, list) else self.seed for row in rows]
        positions = [input_ids.shape[1] - (0 if self.pads is None else self.pads[row]) for row in rows]
        # Nodes at one depth share their noise: making it once is most of the cost of a wide tree saved.
        known: dict[tuple[int, int], int] = {}
        place = [known.setdefault(key, len(known)) for key in zip(seeds, positions)]
        keys = torch.tensor(list(known), dtype=torch.long, device=device)
        noise = invariant_noise(keys[:, 0], keys[:, 1], vocab)
        noisy = scores + (noise if len(known) == 1 else noise[torch.tensor(place, device=device)])
        drawn = noisy.argmax(dim=-1, keepdim=True)
        # NaN where no token is left or the scores are no numbers: sampling refuses it, as it does without the noise.
        score = (0.0 * noisy.gather(1, drawn)).to(scores.dtype)
        return torch.full_like(scores, float("-inf")).scatter(1, drawn, score)
