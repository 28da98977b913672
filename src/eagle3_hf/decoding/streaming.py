"""What streamers are told, and a streamer that also learns how each token came."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class SpeculationStreamer(BaseStreamer):
    """Streamer that is told, block by block, which tokens were drafted and accepted.

    Any transformers streamer works with `generate()`; this one gets more: after each round, the new ids and how many
    of them (the first `accepted`) were draft tokens. The rest came from the target itself.

    Args:
        on_block: called with `(token_ids: list[int], accepted: int)`. The prompt isn't passed on. With plain
            `generate()` (no draft) it is called once a token with `accepted=0`.
        on_end: called once, when generation ends.
    """

    def __init__(self, on_block: Callable[[list[int], int], None], on_end: Callable[[], None] | None = None):
        self.on_block = on_block
        self.on_end = on_end
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self.put_block(value.flatten().tolist(), 0)

    def put_block(self, token_ids: list[int], accepted: int) -> None:
        """One round's new tokens; the decoding loop calls this instead of `put` where it exists."""
        self.on_block(token_ids, accepted)

    def end(self) -> None:
        self._prompt_seen = False
        if self.on_end is not None:
            self.on_end()


def stream_block(streamer: Any, tree: Any, token_ids: list[int], accepted: int) -> None:
    """Tell a streamer of one round's new tokens.

    Args:
        streamer: any of transformers' kind; `put_tree` and `put_block` are called where it has them.
        tree: the `DraftTree` that was verified, `None` where nothing was drafted.
        token_ids: the new tokens.
        accepted: how many of them, the first ones, were draft tokens.
    """
    if tree is not None and hasattr(streamer, "put_tree"):
        streamer.put_tree(tree)
    if hasattr(streamer, "put_block"):
        streamer.put_block(token_ids, accepted)
    elif token_ids:
        streamer.put(torch.tensor(token_ids))
