"""The host's side of generation: texts, limits and stopping around the compiled graphs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..decoding.statistics import SpeculationStats
from .buckets import pick
from .runtime import GraphRuntime


@dataclass
class HostSampling:
    """Temperature and random numbers for graphs compiled with `do_sample`; temperature 0 is greedy."""

    temperature: float

    def draw(self, batch: int, places: int) -> list[torch.Tensor]:
        """float32 `[batch]` and `[batch, places]`, from torch's global generator."""
        return [torch.full((batch,), self.temperature), torch.rand(batch, places)]


Stop = Callable[[list[int]], bool]


def unpad(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad: int | None, vocab_size: int
) -> list[list[int]]:
    """Rows without the padding in front.

    Args:
        input_ids: `[batch, prompt]`, integers.
        attention_mask: `[batch, prompt]`, zero on padding; `None`: padding is where `pad` is.
        pad: the padding token; `None`: there is no padding where there is no mask.
        vocab_size: tokens that the target knows.

    Raises:
        ValueError: tensors of another kind, padding anywhere else, a row without a token, an unknown token.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.is_complex():
        raise ValueError(
            f"input_ids must be integers [batch, prompt], got {str(input_ids.dtype).removeprefix('torch.')} "
            f"{list(input_ids.shape)}"
        )
    if not input_ids.numel():
        raise ValueError("a prompt is empty: speculation needs at least one token to start from")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be {list(input_ids.shape)}, as input_ids, got {list(attention_mask.shape)}"
        )
    if attention_mask is not None:
        mask = attention_mask.bool()
    else:
        mask = torch.ones_like(input_ids, dtype=torch.bool) if pad is None else input_ids != pad
    # Behind a prompt's first token there is no padding.
    if (mask[:, :-1] & ~mask[:, 1:]).any():
        if attention_mask is not None:
            raise ValueError("prompts must be padded on the left: set tokenizer.padding_side = 'left'")
        raise ValueError(
            f"the pad token {pad} stands inside or behind a prompt: pad on the left, or pass an attention_mask that "
            "says which tokens are real"
        )
    if not mask.any(dim=1).all():
        raise ValueError("a prompt is empty: speculation needs at least one token to start from")
    wrong = input_ids[mask & ((input_ids < 0) | (input_ids >= vocab_size))]
    if len(wrong):
        raise ValueError(f"token {int(wrong[0])} isn't one of the target's {vocab_size}")
    return [row[kept].tolist() for row, kept in zip(input_ids, mask)]


class Generation:
    """One call of `generate()`.

    Args:
        runtime: of the compiled graphs.
        prompts: tokens of each row, no padding.
        new_tokens: most tokens to add to a row; `None`: up to `sequence_length`.
        sampling: for graphs compiled with `do_sample`, else `None`.
        stop: says of a row's text whether it ends with its last token.

    Raises:
        ValueError: more rows, longer prompts or longer texts than were compiled for.
    """

    def __init__(
        self,
        runtime: GraphRuntime,
        prompts: Sequence[Sequence[int]],
        new_tokens: int | None,
        sampling: HostSampling | None,
        stop: Stop,
    ):
        config = runtime.config
        self.runtime, self.sampling, self.stop = runtime, sampling, stop
        if len(prompts) > config.batch_size:
            raise ValueError(
                f"batch of {len(prompts)} is above the compiled batch_size {config.batch_size}: split it, or export "
                "with a larger one"
            )
        self.scratch = config.sequence_length - 1
        longest = max(map(len, prompts))
        self.bucket = pick(longest, config.context_buckets or [], "prompt length")
        if longest > self.scratch:
            raise ValueError(
                f"prompt length {longest} leaves no room: sequence_length {config.sequence_length} takes prompts of at "
                f"most {self.scratch} tokens"
            )
        if new_tokens is not None and longest + new_tokens > config.sequence_length:
            raise ValueError(
                f"prompt of {longest} tokens and max_new_tokens {new_tokens} are above the compiled sequence_length "
                f"{config.sequence_length}"
            )
        self.texts = [list(prompt) for prompt in prompts]
        self.limits = [config.sequence_length if new_tokens is None else len(prompt) + new_tokens for prompt in prompts]
        self.active = [len(text) < limit for text, limit in zip(self.texts, self.limits)]
        self.stats = SpeculationStats()

    def _column(self, values: Sequence[int], idle: int) -> torch.Tensor:
        """int32 `[batch]`: a value for each running row, `idle` for all others of the compiled batch."""
        made = [value if active else idle for value, active in zip(values, self.active)]
        return torch.tensor(made + [idle] * (self.runtime.config.batch_size - len(made)), dtype=torch.int32)

    def _positions(self) -> torch.Tensor:
        return self._column([len(text) - 1 for text in self.texts], self.scratch)

    def _append(self, row: int, tokens: Sequence[int]) -> int:
        """Add tokens up to where the row ends; returns how many."""
        text = self.texts[row]
        for count, token in enumerate(tokens, start=1):
            text.append(token)
            if len(text) >= self.limits[row] or self.stop(text):
                self.active[row] = False
                return count
        return len(tokens)

    def _worth_drafting(self) -> bool:
        """Whether a draft could still be kept in any row: past that, one token a call is all there is to gain."""
        return any(
            active and len(text) < self.scratch and len(text) + 1 < limit
            for text, limit, active in zip(self.texts, self.limits, self.active)
        )

    def run(self) -> list[list[int]]:
        """All rows' texts, prompt included."""
        start = time.perf_counter()
        drafts = self._prefill() if any(self.active) else None
        self.stats.prefill_seconds = time.perf_counter() - start
        while any(self.active):
            last = self._column([text[-1] for text in self.texts], 0)
            if drafts is not None and self._worth_drafting():
                drafts = self._round(last, drafts)
                continue
            drafts = None
            running = list(self.active)
            tokens = self.runtime.decode(last, self._positions(), self.sampling).tolist()
            for row, was in enumerate(running):
                if was:
                    self.stats.count_round(0, 0, 0, self._append(row, tokens[row : row + 1]))
        self.stats.total_seconds = time.perf_counter() - start
        return self.texts

    def _prefill(self) -> torch.Tensor | None:
        batch, size = self.runtime.config.batch_size, self.bucket
        lengths = self._column(list(map(len, self.texts)), 0)
        ids = torch.zeros(batch, size, dtype=torch.int32)
        for row, text in enumerate(self.texts):
            ids[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
        token, features = self.runtime.prefill(ids, lengths, self.sampling)
        was = list(self.active)
        for row, active in enumerate(was):
            if active:
                self._append(row, [int(token[row])])
        if not self._worth_drafting():
            return None
        # The feature of each token goes with the token after it.
        following = torch.zeros_like(ids)
        for row, text in enumerate(self.texts):
            count = int(lengths[row])
            following[row, :count] = torch.tensor(text[1 : count + 1], dtype=torch.int32)
        counts = torch.where(self._column([1] * len(self.texts), 0) > 0, lengths, torch.zeros_like(lengths))
        start = self._column([0] * len(self.texts), self.scratch)
        return self.runtime.propose(following, features, start, counts)

    def _round(self, last: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        ids = torch.cat((last[:, None], drafts), dim=1)
        running = list(self.active)
        out, count, following = self.runtime.step(ids, self._positions(), self.sampling)
        width = drafts.shape[1]
        for row, tokens in enumerate(out.tolist()[: len(running)]):
            if running[row]:
                new = tokens[: int(count[row])]
                kept = self._append(row, new)
                self.stats.count_round(width, width, min(len(new) - 1, kept), kept)
        return following


def stop_rule(eos: set[int], criteria: Sequence[Any]) -> Stop:
    """A rule that ends a row at an EOS token, or when any of `criteria` says so of its text alone."""

    def stop(text: list[int]) -> bool:
        if text[-1] in eos:
            return True
        return bool(criteria) and any(bool(torch.as_tensor(c(torch.tensor([text]), None)).any()) for c in criteria)

    return stop
