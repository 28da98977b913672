"""SpeculativeCache: key/value memory in which every sequence of a batch has its own length.

One rule makes ragged acceptance, trees and static shapes the same thing: slot `j` of row `b` holds the token at
position `j` of that row's own text (padding is never stored), and whoever runs a forward says beforehand to which
slots the new rows go. Slots at or past a row's length are scratch and are overwritten by the next forward.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

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
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._grow()
        start, used = self.owner.write_start, self.owner.used
        count = key_states.shape[2]
        if start is not None:
            self.keys[:, :, start : start + count] = key_states
            self.values[:, :, start : start + count] = value_states
        else:
            # Indexed assignment, not scatter_: scatter_ copies the whole buffer first.
            rows, slots = self.owner.slots_on(key_states.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :used], self.values[:, :, :used]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy rows between slots; `source` and `target` are `[batch, n]` and may overlap."""
        for stored in (self.keys, self.values):
            rows = torch.arange(stored.shape[0], device=stored.device)[:, None]
            stored[rows, :, target.to(stored.device)] = stored[rows, :, source.to(stored.device)]

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
        self._capacity = 0
        self._slots: torch.Tensor | None = None
        self._slots_by_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        super().__init__(layers=[SpeculativeLayer(self) for _ in range(num_layers)])

    @property
    def longest(self) -> int:
        """Length of the longest row."""
        return max(self.lengths, default=0)

    def capacity_for(self, slots: int) -> int:
        """Slots to allocate so that `slots` fit: whole blocks, a quarter spare, never past `max_length`."""
        if slots > self._capacity:
            capacity = -(-max(slots, int(self._capacity * 1.25)) // _BLOCK) * _BLOCK
            self._capacity = capacity if self.max_length is None else max(slots, min(capacity, self.max_length))
        return self._capacity

    def begin_write(self, slots: torch.Tensor | None, count: int, batch: int | None = None, offset: int = 0) -> None:
        """Say where the next forward's `count` new rows go.

        Args:
            slots: `[batch, count]` int64, the slot of each new row; `None` to append at the same place in every row,
                which needs equal lengths and is a plain slice copy.
            count: rows each sequence gets.
            batch: number of sequences; needed before the first write only.
            offset: scratch rows between a row's length and the new ones.

        Raises:
            ValueError: the write would pass `max_length`, or lengths differ and `slots` is `None`.
        """
        if not self.lengths:
            if batch is None:
                raise ValueError("the first write needs the batch size")
            self.lengths = [0] * batch
        if slots is None and min(self.lengths) != self.longest:
            raise ValueError("rows of different lengths need explicit write slots")
        used = self.longest + offset + count
        if self.max_length is not None and used > self.max_length:
            raise ValueError(f"{used} cache slots are needed, {self.max_length} are allowed: speculate fewer tokens")
        self.used = used
        self.capacity_for(used)
        self.write_start = self.longest + offset if slots is None else None
        self._slots, self._slots_by_device = slots, {}

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

    def select_rows(self, rows: list[int]) -> None:
        """Keep only these rows of the batch (finished rows free their memory)."""
        index = torch.tensor(rows)
        for layer in self.layers:
            layer.select_rows(index)
        self.set_lengths([self.lengths[row] for row in rows])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.select_rows(indices.tolist())

    def get_seq_length(self, layer_idx: int | None = 0, *args: Any) -> int:
        return self.longest

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.longest

    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        ready = [layer for layer in self.layers if layer.is_initialized]
        return sum(t.numel() * t.element_size() for layer in ready for t in (layer.keys, layer.values))
