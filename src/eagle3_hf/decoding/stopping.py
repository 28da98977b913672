"""Where a row's new block ends: EOS, length, and any other stopping criterion, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


def length_limit(criteria: StoppingCriteriaList, config: GenerationConfig) -> int:
    """Most columns a row may use: a length criterion of the user's takes the place of the config's, as in plain."""
    limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min(limits) if limits else config.max_length  # type: ignore[return-value]


class _StepScores(Sequence):
    """Scores as plain generation hands them to criteria, one `[batch, vocab]` a step, made when looked at.

    Args:
        rows: scores `[vocab]` of each step of each running row, by its place in the batch; other rows show zeros.
        batch_size: rows of the original call.
        steps: how many steps there are.
    """

    def __init__(self, rows: dict[int, list[torch.Tensor]], batch_size: int, steps: int):
        self.rows, self.batch_size, self.steps = rows, batch_size, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: Any) -> Any:
        at = range(self.steps)[index]
        if isinstance(at, range):
            return tuple(self[i] for i in at)
        known = {row: values[at] for row, values in self.rows.items() if at < len(values)}
        blank = torch.zeros_like(next(iter(known.values())))
        return torch.stack([known.get(row, blank) for row in range(self.batch_size)])


class BlockStopper:
    """Cuts blocks of new tokens the way plain token-by-token generation would have ended them.

    Args:
        criteria: as `generate()` prepared them.
        batch_size: rows of the original call.
        pad: id that fills the columns of rows that have ended when criteria are asked.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch_size: int, pad: int):
        # The criteria, not the generation config, have the last word on EOS: users may pass their own.
        eos = [criterion.eos_token_id.flatten() for criterion in criteria if type(criterion) is EosTokenCriteria]
        self.eos = torch.cat(eos) if eos else None
        self.timers = StoppingCriteriaList([c for c in criteria if type(c) is MaxTimeCriteria])
        own = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.others = StoppingCriteriaList([c for c in criteria if type(c) not in own])
        self.batch_size, self.pad = batch_size, pad

    def cut(
        self, tokens: torch.Tensor, counts: torch.Tensor, budgets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut each row at its budget and after its first EOS.

        Args:
            tokens: int64 `[batch, width]` new tokens.
            counts: int64 `[batch]`, how many of them are there.
            budgets: int64 `[batch]`, how many may be added.

        Returns:
            int64 `[batch]` tokens to keep, bool `[batch]` rows that end with them.
        """
        kept = torch.minimum(counts, budgets)
        ended = kept >= budgets
        if self.eos is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            is_eos = torch.isin(tokens, self.eos.to(tokens.device)) & (place < kept[:, None])
            first = torch.where(is_eos, place, tokens.shape[1]).min(dim=1).values
            ended = ended | (first < tokens.shape[1])
            kept = torch.minimum(kept, first + 1)
        return kept, ended

    def ask(
        self,
        ids: torch.Tensor,
        lengths: list[int],
        block: list[list[int]],
        rows: list[int],
        scores: list[list[torch.Tensor]] | None,
    ) -> tuple[list[int], list[bool]]:
        """Ask the remaining criteria after each token of each row's block.

        Args:
            ids: int64 `[batch, width]` texts before the block, left-padded as plain `generate()` holds them.
            lengths: columns of `ids` in use, by row.
            block: new tokens of each row.
            rows: place of each row in the original batch.
            scores: processed scores `[vocab]` of each row's steps, the block's too, if they are kept.

        Returns:
            How many tokens each row keeps, and whether it ends.
        """
        kept, ended = [len(tokens) for tokens in block], [False] * len(block)
        if self.others:
            for offset in range(max(kept, default=0)):
                asking = [i for i in range(len(block)) if not ended[i] and offset < kept[i]]
                # Rows are at different columns, and criteria may count them: one question for each width.
                for width in sorted({lengths[i] + offset + 1 for i in asking}):
                    answers = self._answers(ids, lengths, block, rows, width, scores)
                    for i in asking:
                        if lengths[i] + offset + 1 == width and answers[rows[i]]:
                            kept[i], ended[i] = offset + 1, True
        if self.timers and bool(self.timers(ids, None).any()):  # type: ignore[arg-type]
            ended = [True] * len(block)
        return kept, ended

    def _answers(
        self,
        ids: torch.Tensor,
        lengths: list[int],
        block: list[list[int]],
        rows: list[int],
        width: int,
        scores: list[list[torch.Tensor]] | None,
    ) -> list[bool]:
        """What the criteria say of the texts cut at `width` columns, for every row of the original batch."""
        texts = ids.new_full((self.batch_size, width), self.pad)
        for i, (length, tokens) in enumerate(zip(lengths, block)):
            new = torch.tensor(tokens, dtype=ids.dtype, device=ids.device)
            text = torch.cat((ids[i, :length], new))[:width]
            texts[rows[i], : text.numel()] = text
        steps = None
        if scores is not None:
            prompt = lengths[0] + len(block[0]) - len(scores[0])
            steps = _StepScores(dict(zip(rows, scores)), self.batch_size, width - prompt)
        return self.others(texts, steps).tolist()  # type: ignore[arg-type]
