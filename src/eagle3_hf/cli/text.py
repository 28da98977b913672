"""Text on the screen while it is generated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from ..decoding.statistics import SpeculationStats


class TextStream:
    """Turns growing token ids into pieces of text that can be printed at once.

    The whole answer is decoded each time and the new end returned, since a token alone has no certain text: spaces
    depend on the neighbours, and one character may span several tokens. An unfinished character is held back.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._shown = 0

    def _decode(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def push(self, ids: list[int]) -> str:
        """Add tokens; returns the text that is now certain."""
        self.ids += ids
        text = self._decode()
        # An incomplete UTF-8 sequence decodes to replacement characters at the end.
        return self._advance(text[: len(text.rstrip("\ufffd"))])

    def finish(self) -> str:
        """What was held back."""
        return self._advance(self._decode())

    def _advance(self, text: str) -> str:
        piece, self._shown = text[self._shown :], max(self._shown, len(text))
        return piece


def coloured_block(
    console: Console, stream: TextStream, drafted_style: str | None = "bold green"
) -> Callable[[list[int], int], None]:
    """A callback for `SpeculationStreamer` that prints accepted draft tokens in `drafted_style`, the rest plain."""

    def show(ids: list[int], accepted: int) -> None:
        for part, style in ((ids[:accepted], drafted_style), (ids[accepted:], None)):
            if part and (piece := stream.push(part)):
                console.out(piece, style=style, highlight=False, end="")

    return show


def stats_text(stats: SpeculationStats) -> str:
    """The counts of a speculative call, in three lines."""
    shares = " ".join(f"{share:.2f}" for share in stats.conditional_acceptance) or "-"
    return (
        f"tau {stats.tau:.2f} tokens a target forward\n"
        f"accepted {stats.accepted} of {stats.drafted} drafted tokens ({100 * stats.acceptance_rate:.0f} %), "
        f"by position: {shares}\n"
        f"cycle efficiency {stats.cycle_efficiency:.2f}"
    )
