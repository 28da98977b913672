"""The memory of one `generate()` call: taken from an earlier call's cache, and kept for a later one."""

from __future__ import annotations

from typing import Any

from ..aux_layers import text_config
from .cache import SpeculativeCache
from .candidate_generator import Eagle3CandidateGenerator
from .kept import DraftMemory, KeptText, Origin, draft_memory, resume
from .multimodal import placeholder_ends, refuse_types_after
from .rows import Rows


class Memory:
    """Who owns the target's and the draft's caches before, in and after a call.

    Args:
        model_kwargs: as `generate()` prepared them, `past_key_values` in it.
        rows: the texts.
        target, draft, aux_ids: who reads and writes.
        slots: most slots a row may take in this call.
        returned: whether the call hands its cache out.

    Attributes:
        offsets: how far each row's positions are ahead of counting, `None` for nowhere.

    Raises:
        ValueError: a `past_key_values` that doesn't go with the rest.
    """

    def __init__(
        self,
        model_kwargs: dict[str, Any],
        rows: Rows,
        target: Any,
        draft: Any,
        aux_ids: tuple[int, ...],
        slots: int,
        returned: bool,
    ):
        past = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        layers = text_config(target).num_hidden_layers
        own = isinstance(past, SpeculativeCache)
        # A cache of the caller's is kept up to date, as plain generation does.
        self.wanted = returned or own
        self.cache, self._kept, self._draft = SpeculativeCache(layers), KeptText([], None, Origin(target)), None
        if own or (past is not None and past.get_seq_length() > 0):
            self.cache, self._kept = resume(past, rows.prompt, rows.pads.tolist(), target, layers)
            self._draft = draft_memory(self._kept, draft, aux_ids)
        self.cache.max_length = max(slots, self.cache.longest)
        self._before = list(self.cache.lengths)
        self._made_with = (aux_ids, Origin(draft))
        self.offsets, self._target, self._inputs = self._kept.offsets, target, model_kwargs
        refuse_types_after(model_kwargs, self._before, rows.pads.tolist())

    def lend(self, generator: Eagle3CandidateGenerator) -> None:
        """Give the draft what it remembers; until `keep()` or `roll_back()` the cache is detached from its text."""
        self.cache.kept = None
        if self._draft is not None:
            generator.resume(self._draft.cache, self._draft.offsets)
        elif any(self._before):
            generator.resume(generator.cache, self._before)

    def let_go(self, cache: SpeculativeCache, going: list[int]) -> None:
        """Free the rows that ended, or set them aside where they are wanted later."""
        if self.wanted:
            cache.park(going)
        elif going:
            cache.select_rows(going)

    def keep(self, generator: Eagle3CandidateGenerator, rows: Rows) -> None:
        """Put the caches in order for a later call."""
        if not self.wanted:
            return
        self.cache.unpark()
        generator.cache.unpark()
        offsets = [have - seen for have, seen in zip(self.cache.lengths, generator.cache.lengths)]
        aux_ids, origin = self._made_with
        self.cache.max_length = None
        draft = DraftMemory(generator.cache, offsets, aux_ids, origin)
        self.cache.kept = KeptText(rows.texts(), draft, self._kept.origin, self.offsets, self._media_ends(rows))

    def _media_ends(self, rows: Rows) -> list[int] | None:
        before, now = self._kept.media_ends, placeholder_ends(self._target, self._inputs, rows)
        return [max(pair) for pair in zip(before, now)] if before and now else now or before

    def roll_back(self) -> None:
        """After an error: the cache holds again what it held before. Slots below a row's length are never written."""
        if not any(self._before):
            self.cache.reset()
            return
        self.cache.unpark()
        self.cache.set_lengths(self._before)
        if self._draft is not None:
            self._draft.cache.unpark()
            self._draft.cache.set_lengths([n - o for n, o in zip(self._before, self._draft.offsets)])
        self.cache.max_length = None
        self.cache.kept = self._kept
