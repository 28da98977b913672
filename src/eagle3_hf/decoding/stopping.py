"""Where a row's new block ends: EOS, length, and any other stopping criterion, token by token."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria


class BlockStopper:
    """Cuts blocks of new tokens the way plain token-by-token generation would have ended them.

    Args:
        criteria: as `generate()` prepared them.
        generation_config: for the EOS ids.
        batch_size: rows of the original call.
        pad: id that fills the columns left of a shorter row when criteria are asked.
    """

    def __init__(self, criteria: StoppingCriteriaList, generation_config: GenerationConfig, batch_size: int, pad: int):
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.eos = None if eos is None else eos.flatten()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria and self.eos is None:
                self.eos = criterion.eos_token_id.flatten()
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
        self, ids: torch.Tensor, lengths: list[int], block: list[list[int]], rows: list[int], scores: tuple | None
    ) -> tuple[list[int], list[bool]]:
        """Ask the remaining criteria after each token of each row's block.

        Args:
            ids: int64 `[batch, width]` texts before the block, left-padded as plain `generate()` holds them.
            lengths: columns of `ids` in use, by row.
            block: new tokens of each row.
            rows: place of each row in the original batch.
            scores: passed on to the criteria.

        Returns:
            How many tokens each row keeps, and whether it ends.
        """
        kept, ended = [len(tokens) for tokens in block], [False] * len(block)
        if self.others:
            for offset in range(max(kept, default=0)):
                if all(ended[i] or offset >= kept[i] for i in range(len(block))):
                    break
                answers = self._answers(ids, lengths, block, rows, offset + 1, scores)
                for i in range(len(block)):
                    if not ended[i] and offset < kept[i] and answers[rows[i]]:
                        kept[i], ended[i] = offset + 1, True
        if self.timers and bool(self.timers(ids, scores).any()):  # type: ignore[arg-type]
            ended = [True] * len(block)
        return kept, ended

    def _answers(
        self, ids: torch.Tensor, lengths: list[int], block: list[list[int]], rows: list[int], count: int, scores: tuple | None
    ) -> list[bool]:
        width = max(length + min(count, len(tokens)) for length, tokens in zip(lengths, block))
        texts = ids.new_full((self.batch_size, width), self.pad)
        for i, (length, tokens) in enumerate(zip(lengths, block)):
            new = torch.tensor(tokens[:count], dtype=ids.dtype, device=ids.device)
            text = torch.cat((ids[i, :length], new))
            texts[rows[i], width - text.numel() :] = text
        return self.others(texts, scores).tolist()  # type: ignore[arg-type]
