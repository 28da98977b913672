"""Rows: the texts of a batch while they grow at different speeds."""

from __future__ import annotations

import torch
from transformers import GenerationConfig

_BLOCK = 256


class Rows:
    """Texts of the rows still running, and the finished ones.

    Texts are held as plain `generate()` holds them, prompt left-padded; `columns[i]` counts the columns in use and
    `pads[i]` the padding in front, so row `i`'s text has `columns[i] - pads[i]` tokens.

    Args:
        input_ids: int64 `[batch, prompt]`.
        attention_mask: `[batch, prompt]`, or `None` for no padding.
        config: for the pad id.
        max_length: most columns a row may use.

    Raises:
        ValueError: padding that isn't on the left, or a row without any token.
    """

    def __init__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig, max_length: int
    ):
        batch, width = input_ids.shape
        self.device = input_ids.device
        self.width = width
        pad = getattr(config, "_pad_token_tensor", None)
        self.pad = 0 if pad is None else int(pad)
        if attention_mask is None or bool(attention_mask.all()):
            self.pads = [0] * batch
        else:
            real = attention_mask.long()
            counts = real.sum(dim=1)
            expected = torch.arange(width, device=real.device)[None] >= width - counts[:, None]
            if bool((expected != real.bool()).any()) or int(counts.min()) == 0:
                raise ValueError(
                    "prompts must be padded on the left and not be empty: set tokenizer.padding_side = 'left'"
                )
            self.pads = (width - counts).tolist()
        if width == 0:
            raise ValueError("the prompt is empty: speculation needs at least one token to start from")
        self._all_pads = list(self.pads)
        self.ids = input_ids.clone()
        self.columns = [width] * batch
        self.original = list(range(batch))
        self.max_length = max_length
        self.started = False
        self.finished: list[list[int]] = [[] for _ in range(batch)]
        self.prompt = input_ids
        self._generated: list[list[int]] = [[] for _ in range(batch)]

    @property
    def active(self) -> bool:
        """Whether any row is still running."""
        return bool(self.columns)

    @property
    def limits(self) -> list[int]:
        """Most tokens each row's text may have, padding not counted."""
        return [self.max_length - pad for pad in self.pads]

    def text_lengths(self) -> list[int]:
        """Tokens of each row's text, padding not counted."""
        return [columns - pad for columns, pad in zip(self.columns, self.pads)]

    def budgets(self, device: torch.device) -> torch.Tensor:
        """int64 `[rows]`: tokens each row may still get."""
        return torch.tensor([self.max_length - columns for columns in self.columns], device=device)

    def right_padded(self, cached: list[int]) -> tuple[torch.Tensor, list[int]]:
        """What is to be run of the prompts, with its padding on the right (`[batch, longest]`), and its lengths.

        Args:
            cached: tokens at the start of each row that were run before; empty for none.
        """
        lengths = [length - have for length, have in zip(self.text_lengths(), cached or [0] * len(self.pads))]
        shifts = [self.width - length for length in lengths]
        if not any(shifts):
            return self.prompt, lengths
        index = torch.arange(max(lengths), device=self.device)[None] + torch.tensor(shifts, device=self.device)[:, None]
        return self.prompt.gather(1, index % self.width), lengths

    def first_token(self) -> torch.Tensor:
        """int64 `[1, 1]`: some token of the prompt."""
        return self.prompt[:1, -1:]

    def texts(self) -> list[torch.Tensor]:
        """int64 `[length]` for each row of the call: its text, padding not counted."""
        new = [torch.tensor(tokens, dtype=self.prompt.dtype, device=self.device) for tokens in self._generated]
        return [torch.cat((ids[pad:], more)) for ids, pad, more in zip(self.prompt, self._all_pads, new)]

    def roots(self) -> torch.Tensor:
        """int64 `[rows]`: the last committed token of each row."""
        ends = torch.tensor(self.columns, device=self.device)[:, None] - 1
        return self.ids.gather(1, ends)[:, 0]

    def append(self, blocks: list[list[int]], done: list[bool]) -> list[int]:
        """Add each row's new tokens and let go of rows that are done; returns the places of those that go on."""
        self.started = True
        missing = max(map(sum, zip(self.columns, map(len, blocks)))) - self.ids.shape[1]
        if missing > 0:
            # In steps: max_length may be far more than is ever used.
            more = min(max(missing, _BLOCK), self.max_length - self.ids.shape[1])
            self.ids = torch.nn.functional.pad(self.ids, (0, more), value=self.pad)
        rows = [i for i, tokens in enumerate(blocks) for _ in tokens]
        columns = [column + j for column, tokens in zip(self.columns, blocks) for j in range(len(tokens))]
        at = torch.tensor([rows, columns], dtype=torch.long, device=self.device)
        new = [token for tokens in blocks for token in tokens]
        self.ids[at[0], at[1]] = torch.tensor(new, dtype=self.ids.dtype, device=self.device)
        for i, tokens in enumerate(blocks):
            self.columns[i] += len(tokens)
            self._generated[self.original[i]] += tokens
        going = [i for i, ended in enumerate(done) if not ended]
        if len(going) < len(done):
            self.ids = self.ids[going]
            for name in ("columns", "pads", "original"):
                values = getattr(self, name)
                setattr(self, name, [values[i] for i in going])
        return going

    def sequences(self) -> torch.Tensor:
        """int64 `[batch, prompt + longest answer]`, shorter answers padded on the right as `generate()` does."""
        longest = max(map(len, self._generated))
        answers = [tokens + [self.pad] * (longest - len(tokens)) for tokens in self._generated]
        new = torch.tensor(answers, dtype=self.prompt.dtype, device=self.device).view(len(answers), longest)
        return torch.cat((self.prompt, new), dim=1)
