"""Where a row's new block ends: EOS, length, and any other stopping criterion, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

if TYPE_CHECKING:
    from .rows import Rows


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

    def out_of_time(self) -> bool:
        """Whether `max_time` is over."""
        # On the host: an answer on the device would have to be waited for.
        return bool(self.timers) and bool(self.timers(torch.zeros(1, 0, dtype=torch.long), None).any())  # type: ignore[arg-type]

    def ask(
        self,
        texts: Rows,
        block: np.ndarray,
        counts: np.ndarray,
        done: np.ndarray,
        scores: list[list[torch.Tensor]] | None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ask the remaining criteria after each token of each row's block.

        Args:
            texts: before the block.
            block: int64 `[rows, width]`, new tokens.
            counts: int64 `[rows]`, how many of them each row would keep.
            done: bool `[rows]`, rows that end with them.
            scores: processed scores `[vocab]` of each row's steps, the block's too, if they are kept.

        Returns:
            How many tokens each row keeps, and whether it ends.
        """
        kept, stopped = counts.copy(), np.zeros_like(done)
        ids, lengths = self._texts(texts, block), texts.columns
        for offset in range(int(counts.max(initial=0))):
            asking = ~stopped & (offset < counts)
            # Rows are at different columns, and criteria may count them: one question for each width.
            for width in np.unique(lengths[asking] + offset + 1).tolist():
                answers = self._answers(ids, texts, counts, width, scores)
                ending = asking & (lengths + offset + 1 == width) & answers
                kept[ending], stopped = offset + 1, stopped | ending
        return kept, done | stopped

    def _texts(self, texts: Rows, block: np.ndarray) -> torch.Tensor:
        """int64 `[batch of the call, width]`: texts with the block behind them, padding where rows have ended."""
        width = int(texts.columns.max()) + block.shape[1]
        whole = texts.ids.new_full((self.batch_size, width), self.pad)
        at = torch.tensor(texts.original, device=whole.device)
        used = min(width, texts.ids.shape[1])
        whole[at, :used] = texts.ids[:, :used]
        place = texts.ends()[:, None] + torch.arange(block.shape[1], device=whole.device)
        whole[at[:, None], place] = torch.tensor(block, dtype=whole.dtype, device=whole.device)
        return whole

    def _answers(
        self, ids: torch.Tensor, texts: Rows, counts: np.ndarray, width: int, scores: list[list[torch.Tensor]] | None
    ) -> np.ndarray:
        """bool `[rows]`: what the criteria say of the texts cut at `width` columns."""
        columns = torch.arange(width, device=ids.device)
        ends = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        ends[torch.tensor(texts.original, device=ids.device)] = torch.tensor(texts.columns + counts, device=ids.device)
        shown = torch.where(columns < ends[:, None], ids[:, :width], self.pad)
        steps = None
        if scores is not None:
            prompt = int(texts.columns[0] + counts[0]) - len(scores[0])
            steps = _StepScores(dict(zip(texts.original.tolist(), scores)), self.batch_size, width - prompt)
        return np.array(self.others(shown, steps).tolist())[texts.original]  # type: ignore[arg-type]
