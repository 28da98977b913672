"""Rows: the texts of a batch while they grow at different speeds."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

_BLOCK = 256


class Rows:
    """Texts of the rows still running, and the finished ones.

    Texts are held as plain `generate()` holds them, prompt left-padded; `columns[i]` counts the columns in use and
    `pads[i]` the padding in front, so row `i`'s text has `columns[i] - pads[i]` tokens. What stands in `ids` behind
    the columns in use means nothing.

    Args:
        input_ids: int64 `[batch, prompt]`.
        attention_mask: `[batch, prompt]`, or `None` for no padding.
        config: for the pad id.
        max_length: most columns a row may use.

    Attributes:
        columns, pads, original: int64 arrays `[rows]` on the host; `original` is a row's place in the call's batch.

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
        self.pads = np.zeros(batch, dtype=np.int64)
        if attention_mask is not None and not bool(attention_mask.all()):
            real = attention_mask.long()
            counts = real.sum(dim=1)
            expected = torch.arange(width, device=real.device)[None] >= width - counts[:, None]
            if bool((expected != real.bool()).any()) or int(counts.min()) == 0:
                raise ValueError(
                    "prompts must be padded on the left and not be empty: set tokenizer.padding_side = 'left'"
                )
            self.pads = np.array((width - counts).tolist(), dtype=np.int64)
        if width == 0:
            raise ValueError("the prompt is empty: speculation needs at least one token to start from")
        self._all_pads = self.pads
        self.ids = input_ids.clone()
        self.columns = np.full(batch, width, dtype=np.int64)
        self.original = np.arange(batch)
        self.max_length = max_length
        self.started = False
        self.prompt = input_ids
        self._answers: list[torch.Tensor] = [input_ids[0, :0]] * batch  # of rows that have ended
        self._ends: torch.Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether any row is still running."""
        return len(self.columns) > 0

    @property
    def limits(self) -> np.ndarray:
        """int64 `[rows]`: most tokens each row's text may have, padding not counted."""
        return self.max_length - self.pads

    def text_lengths(self) -> np.ndarray:
        """int64 `[rows]`: tokens of each row's text, padding not counted."""
        return self.columns - self.pads

    def prompt_lengths(self) -> np.ndarray:
        """int64 `[batch]`: tokens of each prompt of the call, padding not counted."""
        return self.width - self._all_pads

    def ends(self) -> torch.Tensor:
        """`columns` on the texts' device; brought there once a round."""
        if self._ends is None:
            self._ends = torch.tensor(self.columns, device=self.device)
        return self._ends

    def budgets(self) -> torch.Tensor:
        """int64 `[rows]`: tokens each row may still get."""
        return self.max_length - self.ends()

    def right_padded(self, cached: list[int]) -> tuple[torch.Tensor, list[int]]:
        """What is to be run of the prompts, with its padding on the right (`[batch, longest]`), and its lengths.

        Args:
            cached: tokens at the start of each row that were run before; empty for none.
        """
        lengths = self.text_lengths() - np.array(cached or 0, dtype=np.int64)
        shifts = self.width - lengths
        if not shifts.any():
            return self.prompt, lengths.tolist()
        index = torch.arange(int(lengths.max()), device=self.device) + torch.tensor(shifts, device=self.device)[:, None]
        return self.prompt.gather(1, index % self.width), lengths.tolist()

    def first_token(self) -> torch.Tensor:
        """int64 `[1, 1]`: some token of the prompt."""
        return self.prompt[:1, -1:]

    def texts(self) -> list[torch.Tensor]:
        """int64 `[length]` for each row of the call, all of which have ended: its text, padding not counted."""
        return [torch.cat((ids[pad:], new)) for ids, pad, new in zip(self.prompt, self._all_pads, self._answers)]

    def roots(self) -> torch.Tensor:
        """int64 `[rows]`: the last committed token of each row."""
        return self.ids.gather(1, self.ends()[:, None] - 1)[:, 0]

    def write(self, tokens: torch.Tensor) -> None:
        """Put `tokens` `[rows, count]` behind the columns in use, without taking them into the texts yet."""
        count = tokens.shape[1]
        missing = int(self.columns.max()) + count - self.ids.shape[1]
        if missing > 0:
            # In steps: max_length may be far more than is ever used.
            more = max(missing, min(_BLOCK, self.max_length - self.ids.shape[1]))
            self.ids = torch.nn.functional.pad(self.ids, (0, more), value=self.pad)
        place = self.ends()[:, None] + torch.arange(count, device=self.device)
        self.ids.scatter_(1, place, tokens.to(self.ids))

    def append(self, tokens: torch.Tensor, counts: np.ndarray, done: np.ndarray) -> np.ndarray:
        """Add each row's new tokens and let go of rows that are done.

        Args:
            tokens: int64 `[rows, width]`.
            counts: int64 `[rows]`, how many of them each row gets.
            done: bool `[rows]`.

        Returns:
            The places of the rows that go on.
        """
        self.started = True
        self.write(tokens)
        self.columns = self.columns + counts
        self._ends = None
        going = np.flatnonzero(~done)
        if len(going) < len(done):
            for i in np.flatnonzero(done).tolist():
                self._answers[self.original[i]] = self.ids[i, self.width : self.columns[i]].clone()
            self.ids = self.ids[torch.tensor(going, device=self.device)]
            self.columns, self.pads, self.original = self.columns[going], self.pads[going], self.original[going]
        return going

    def sequences(self) -> torch.Tensor:
        """int64 `[batch, prompt + longest answer]`, shorter answers padded on the right as `generate()` does."""
        answers = pad_sequence(self._answers, batch_first=True, padding_value=self.pad)
        return torch.cat((self.prompt, answers), dim=1)
