"""SpeculativeCache: key/value memory in which every sequence of a batch has its own length.

One rule makes ragged acceptance, trees and static shapes the same thing: slot `j` of row `b` holds the token at
position `j` of that row's own text (padding is never stored), and whoever runs a forward says beforehand to which
slots the new rows go. Slots at or past a row's length are scratch and are overwritten by the next forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

if TYPE_CHECKING:
    from .kept import KeptText

_BLOCK = 256


class SpeculativeLayer(CacheLayerMixin):
    """Keys and values of one layer, `[batch, kv_heads, capacity, head_dim]` each, allocated at first use."""

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, owner: SpeculativeCache):
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        batch, heads, _, dim = key_states.shape
        capacity = self.owner.capacity_for(0)
        # zeros, not empty: scratch slots are multiplied by a zero attention weight, and 0 * nan is nan.
        self.keys = key_states.new_zeros(batch, heads, capacity, dim)
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[-1])
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _grow(self) -> None:
        extra = self.owner.capacity_for(0) - self.keys.shape[2]
        if extra > 0:
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, extra))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, extra))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.owner.check_open()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow()
        start, used, batch = self.owner.write_start, self.owner.used, len(self.owner.lengths)
        count = key_states.shape[2]
        if start is not None:
            self.keys[:batch, :, start : start + count] = key_states
            self.values[:batch, :, start : start + count] = value_states
        else:
            # Indexed assignment, not scatter_: scatter_ copies the whole buffer first.
            rows, slots = self.owner.slots_on(key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:batch, :, :used], self.values[:batch, :, :used]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between slots; `source` and `target` are `[batch, n]` and may overlap."""
        for stored in (self.keys, self.values):
            rows = torch.arange(source.shape[0], device=stored.device)[:, None]
            stored[rows, :, target.to(stored.device)] = stored[rows, :, source.to(stored.device)]

    def reorder(self, order: list[int]) -> None:
        """Put row `order[i]` at place `i`, in place; copies only the rows that move."""
        moved = [i for i, row in enumerate(order) if i != row]
        if moved and self.is_initialized:
            for stored in (self.keys, self.values):
                to, source = torch.tensor([moved, [order[i] for i in moved]], device=stored.device)
                stored[to] = stored[source]

    def select_rows(self, rows: torch.Tensor) -> None:
        if self.is_initialized:
            self.keys = self.keys.index_select(0, rows.to(self.keys.device))
            self.values = self.values.index_select(0, rows.to(self.values.device))

    def get_seq_length(self, *args: Any) -> int:
        return self.owner.longest

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.owner.used, 0

    def get_max_cache_shape(self) -> int:
        return -1

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized = False
        self.keys = self.values = None

    def crop(self, *args: Any) -> None:
        raise RuntimeError("a SpeculativeCache is shortened by set_lengths(), not by crop()")


class SpeculativeCache(Cache):
    """A `Cache` whose rows advance by different amounts, without holes, re-padding or copies of the past.

    Usage, once a forward: `begin_write(...)`, the forward (with explicit 4-D mask and position ids, except for a
    fresh right-padded prompt, where causality alone is right), `commit(...)`.

    `generate()` with a draft takes and returns one as `past_key_values`; see [`resume`] for what it then holds beside
    keys and values. Plain `generate()` of a target takes it too; a bare forward doesn't, see [`to_dynamic_cache`].

    Args:
        num_layers: layers of the model.
        max_length: hard limit of slots a row; a write past it is an error. `None` for no limit.
    """

    is_compileable = False

    def __init__(self, num_layers: int, max_length: int | None = None):
        self.max_length = max_length
        self.lengths: list[int] = []
        self.used = 0
        self.write_start: int | None = 0
        self.kept: KeptText | None = None
        self._open = False
        self._parked: list[int] = []  # lengths of the rows set aside
        self._places: list[int] = []  # which row each row of the buffers is, once some were set aside
        self._capacity = 0
        self._lengths_on: dict[torch.device, tuple[list[int], torch.Tensor]] = {}
        self._slots: torch.Tensor | None = None
        self._slots_by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        super().__init__(layers=[SpeculativeLayer(self) for _ in range(num_layers)])

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self.lengths, default=0)

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        """int64 `[batch]`: `lengths` on `device`, brought there once for each of their values."""
        known, made = self._lengths_on.get(device, (None, None))
        if made is None or known != self.lengths:
            made = torch.tensor(self.lengths, dtype=torch.long, device=device)
            self._lengths_on[device] = (list(self.lengths), made)
        return made

    def capacity_for(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit: whole blocks, a quarter spare, never past `max_length`."""
        if slots > self._capacity:
            capacity = -(-max(slots, int(self._capacity * 1.25)) // _BLOCK) * _BLOCK
            self._capacity = capacity if self.max_length is None else max(slots, min(capacity, self.max_length))
        return self._capacity

    def begin_write(
        self,
        slots: torch.Tensor | None,
        count: int,
        batch: int | None = None,
        offset: int = 0,
        used: int | None = None,
    ) -> None:
        """Say where the next forward's `count` new rows go.

        Args:
            slots: `[batch, count]` int64, the slot of each new row; `None` to append at the same place in every row,
                which needs equal lengths and is a plain slice copy.
            count: rows each sequence gets.
            batch: number of sequences; needed before the first write only.
            offset: scratch rows between a row's length and the new ones.
            used: slots in use afterwards, where it isn't the longest row's length and the new ones.

        Raises:
            ValueError: the write would pass `max_length`, or lengths differ and `slots` is `None`.
        """
        if not self.lengths:
            if batch is None:
                raise ValueError("the first write needs the batch size")
            self.lengths = [0] * batch
        if slots is None and min(self.lengths) != self.longest:
            raise ValueError("rows of different lengths need explicit write slots")
        used = self.longest + offset + count if used is None else used
        if self.max_length is not None and used > self.max_length:
            raise ValueError(f"{used} cache slots are needed, {self.max_length} are allowed: speculate fewer tokens")
        self.used = used
        self.capacity_for(used)
        self.write_start = self.longest + offset if slots is None else None
        self._slots, self._slots_by_device = slots, {}
        self._open = True

    def check_open(self) -> None:
        """Raise unless a write was announced: without, new keys would silently take the place of old ones."""
        if not self._open:
            raise ValueError(
                "a SpeculativeCache is written by generate() with a draft only: for a forward of your own, pass "
                "past_key_values.to_dynamic_cache()"
            )

    def slots_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Row numbers `[batch, 1]` and write slots `[batch, count]` on `device`, made at most once a forward."""
        if device not in self._slots_by_device:
            assert self._slots is not None
            rows = torch.arange(self._slots.shape[0], device=device)[:, None]
            self._slots_by_device[device] = (rows, self._slots.to(device))
        return self._slots_by_device[device]

    def commit(
        self, lengths: list[int], source: torch.Tensor | None = None, target: torch.Tensor | None = None
    ) -> None:
        """Keep rows up to `lengths`, after copying slots `source` to `target` (both `[batch, n]`) where given."""
        if source is not None and target is not None:
            for layer in self.layers:
                layer.move(source, target)
        self.set_lengths(lengths)

    def set_lengths(self, lengths: list[int]) -> None:
        """Set each row's length; what lies past it becomes scratch."""
        self.lengths = list(lengths)
        self.used = self.longest
        self._open = False

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows of the batch (finished rows free their memory)."""
        index = torch.tensor(rows)
        for layer in self.layers:
            layer.select_rows(index)
        self.set_lengths([self.lengths[row] for row in rows])
        if self.kept is not None:
            self.kept.select_rows(rows)

    def park(self, rows: list[int]) -> None:
        """Go on with these rows only and set the others aside, in place, until `unpark()`."""
        places = self._places or list(range(len(self.lengths)))
        away = [row for row in range(len(self.lengths)) if row not in set(rows)]
        order = [*rows, *away]
        for layer in self.layers:
            layer.reorder(order)
        self._places = [places[row] for row in order] + places[len(order) :]
        self._parked = [self.lengths[row] for row in away] + self._parked
        self.set_lengths([self.lengths[row] for row in rows])

    def unpark(self) -> None:
        """Bring the rows set aside back, every row at its place of before."""
        if not self._parked:
            return
        lengths, order = self.lengths + self._parked, sorted(range(len(self._places)), key=self._places.__getitem__)
        for layer in self.layers:
            layer.reorder(order)
        self._parked, self._places = [], []
        self.set_lengths([lengths[row] for row in order])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows, as `DynamicCache` does; a row may come several times."""
        self.select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, for `num_return_sequences`."""
        self.select_rows([row for row in range(len(self.lengths)) for _ in range(repeats)])

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """As `batch_select_indices`."""
        self.select_rows(beam_idx.tolist())

    def reset(self) -> None:
        """Forget everything and free the memory."""
        for layer in self.layers:
            layer.reset()
        self._capacity, self._parked, self._places, self.kept = 0, [], [], None
        self.set_lengths([])

    def crop(self, max_length: int) -> None:
        """Keep the first `max_length` tokens of each row (drop as many at its end, where negative)."""
        self.shorten([length + max_length if max_length < 0 else max_length for length in self.lengths])

    def shorten(self, lengths: list[int]) -> None:
        """Cut rows that are longer to these lengths, in tokens; the draft's memory with them."""
        self.set_lengths([max(0, min(have, want)) for have, want in zip(self.lengths, lengths)])
        if self.kept is not None:
            self.kept.shorten(self.lengths)

    def trim_to(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> list[int]:
        """Keep what each row shares with a new text: after an edit, or where a text was tokenised otherwise.

        Args:
            input_ids: int64 `[batch, text]`, left-padded, the texts of the next call.
            attention_mask: `[batch, text]`, or `None` for no padding.

        Returns:
            Tokens of each row that the next call won't have to run.

        Raises:
            ValueError: another number of rows, or a cache that doesn't know its text.
        """
        if self.kept is None or len(input_ids) != len(self.lengths):
            raise ValueError(
                f"trim_to() takes one text for each of the {len(self.lengths)} rows of a cache that generate() with a "
                f"draft returned, got {len(input_ids)}"
            )
        # One token less than is shared: the draft's memory of a token depends on the next one.
        self.shorten([shared - 1 for shared in self.kept.shared(input_ids, attention_mask)])
        return self.lengths

    def to_dynamic_cache(self, pads: list[int] | None = None) -> DynamicCache:
        """A `DynamicCache` of the same text, for plain forwards of the model.

        Args:
            pads: columns of padding in front of each row's text in the next call; `None` for no padding.

        Returns:
            As many columns as are there of every row; rows that have more are cut. Without its draft's memory.
        """
        pads = pads or [0] * len(self.lengths)
        width = min((length + pad for length, pad in zip(self.lengths, pads)), default=0)
        made = DynamicCache()
        if width <= 0:
            return made
        at = torch.arange(width)[None] - torch.tensor(pads)[:, None]
        for i, layer in enumerate(self.layers):
            slots = at.clamp(min=0).to(layer.keys.device)
            rows = torch.arange(len(slots), device=slots.device)[:, None]
            made.update(*(stored[rows, :, slots].transpose(1, 2) for stored in (layer.keys, layer.values)), i)
        return made

    def get_seq_length(self, layer_idx: int | None = 0, *args: Any) -> int:
        return self.longest

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.longest

    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        ready = [layer for layer in self.layers if layer.is_initialized]
        return sum(t.numel() * t.element_size() for layer in ready for t in (layer.keys, layer.values))
