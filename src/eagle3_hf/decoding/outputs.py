"""What `return_dict_in_generate` hands out for each step, in the form and order of plain `generate()`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

# One entry a layer (and the embeddings), as models give them.
States = tuple[torch.Tensor, ...]


class StepRecorder:
    """Collects scores, logits, hidden states and attentions of the tokens that were kept.

    Plain generation has one forward a step; here a step is the node whose selection became the token. Rows that have
    ended, and columns of padding, show zeros.

    Args:
        config: says what is wanted.
        pads: columns of padding in front of each row's text.
        width: columns of the prompt.
        cached: tokens of each row that weren't run in this call.
    """

    def __init__(self, config: GenerationConfig, pads: list[int], width: int, cached: list[int]):
        keep = config.return_dict_in_generate
        self.pads, self.width, self.cached = list(pads), width, list(cached)

        def rows(wanted: Any) -> list[list[Any]] | None:
            return [[] for _ in pads] if keep and wanted else None

        self.scores, self.logits = rows(config.output_scores), rows(config.output_logits)
        self.hidden_states, self.attentions = rows(config.output_hidden_states), rows(config.output_attentions)
        self._prefill: dict[str, States] = {}

    @property
    def forward_options(self) -> dict[str, bool]:
        """What the target's forwards must return."""
        named = {"output_hidden_states": self.hidden_states, "output_attentions": self.attentions}
        return {name: True for name, store in named.items() if store is not None}

    @property
    def active(self) -> bool:
        """Whether anything is wanted."""
        stores = (self.scores, self.logits, self.hidden_states, self.attentions)
        return any(store is not None for store in stores)

    def add_tokens(
        self, rows: list[int], counts: list[int], nodes: np.ndarray, scores: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """Keep scores and logits of the nodes that gave rows their tokens.

        Args:
            rows: place of each row in the original batch.
            counts: tokens each row keeps.
            nodes: int64 `[batch, width]`, the nodes that gave them.
            scores, logits: float32 `[batch, nodes, vocab]`.
        """
        for store, values in ((self.scores, scores), (self.logits, logits)):
            if store is not None:
                for i, row in enumerate(rows):
                    store[row] += list(values[i, nodes[i, : counts[i]].tolist()])

    def add_prefill(self, out: Any, new: list[int]) -> None:
        """Keep the states of a prefill of `new` tokens a row, right-padded."""
        # Plain generation runs the columns that aren't cached; those of rows with more in the cache stay empty.
        start = min(pad + have for pad, have in zip(self.pads, self.cached)) if any(self.cached) else 0
        width = self.width - start
        shift = torch.tensor([width - count for count in new])
        if self.hidden_states is not None:
            self._prefill["hidden_states"] = tuple(_shifted(layer, shift, 1, width) for layer in out.hidden_states)
        if self.attentions is not None:
            pads = torch.tensor(self.pads)
            self._prefill["attentions"] = tuple(
                _shifted(_shifted(layer, shift, 2, width), pads, 3, self.width) for layer in out.attentions
            )

    def add_states(self, out: Any, rows: list[int], counts: list[int], path: torch.Tensor, starts: list[int]) -> None:
        """Keep the states of a round's nodes.

        Args:
            out: what the target's forward returned.
            rows: place of each row in the original batch.
            counts: tokens each row keeps.
            path: int64 `[batch, width]`, the nodes that gave them.
            starts: slot of each row's root.
        """
        for store, layers in ((self.hidden_states, "hidden_states"), (self.attentions, "attentions")):
            if store is None:
                continue
            picked = [
                gather_places(layer, path, 1) if layers == "hidden_states" else _over_path(layer, path, starts)
                for layer in out[layers]
            ]
            for i, row in enumerate(rows):
                for step in range(counts[i]):
                    keys = slice(None) if layers == "hidden_states" else slice(starts[i] + step + 1)
                    store[row].append([layer[i, ..., step, keys] for layer in picked])

    def result(self) -> dict[str, Any]:
        """The fields of `GenerateDecoderOnlyOutput` that were asked for, one entry a step."""
        found: dict[str, Any] = {}
        for name, store in (("scores", self.scores), ("logits", self.logits)):
            found[name] = None if store is None else _by_step(store)
        for name in ("hidden_states", "attentions"):
            store = getattr(self, name)
            found[name] = None if store is None else (self._prefill[name], *self._states_by_step(store, name))
        return found

    def _states_by_step(self, store: list[list[list[torch.Tensor]]], name: str) -> list[States]:
        steps: list[States] = []
        for t in range(max(map(len, store))):
            layers = []
            for layer in range(len(self._prefill[name])):
                parts = {row: values[t][layer] for row, values in enumerate(store) if t < len(values)}
                if name == "attentions":
                    # Keys are the row's own text; in front of it stands its padding.
                    parts = {row: torch.nn.functional.pad(part, (self.pads[row], 0)) for row, part in parts.items()}
                blank = torch.zeros_like(next(iter(parts.values())))
                whole = torch.stack([parts.get(row, blank) for row in range(len(store))])
                layers.append(whole[..., None, :])
            steps.append(tuple(layers))
        return steps


def _shifted(values: torch.Tensor, shift: torch.Tensor, dim: int, width: int) -> torch.Tensor:
    """Move each row's entries `shift[row]` places up along `dim`, zeros in front; the result is `width` wide."""
    values = torch.nn.functional.pad(values, [0, 0] * (values.dim() - 1 - dim) + [0, max(0, width - values.shape[dim])])
    at = torch.arange(width)[None] - shift[:, None]
    at = at.to(values.device).view(len(values), *[1] * (dim - 1), width, *[1] * (values.dim() - 1 - dim))
    shape = list(values.shape)
    shape[dim] = width
    return values.gather(dim, at.clamp(min=0).expand(shape)).masked_fill(at < 0, 0)


def gather_places(values: torch.Tensor, places: torch.Tensor, dim: int) -> torch.Tensor:
    """`values` at each row's `places` `[batch, n]` along `dim`, which then is `n` wide."""
    shape = list(values.shape)
    shape[dim] = places.shape[1]
    places = places.view(len(places), *[1] * (dim - 1), -1, *[1] * (values.dim() - 1 - dim))
    return values.gather(dim, places.to(values.device).expand(shape))


def _over_path(weights: torch.Tensor, path: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """Attention `[batch, heads, nodes, keys]` of the path's nodes, over each row's past and then the path."""
    path = path.to(weights.device)
    start = torch.tensor(starts, device=weights.device)[:, None]
    queries = gather_places(weights, path, 2)
    column = torch.arange(max(starts) + path.shape[1], device=weights.device)[None]
    node = path.gather(1, (column - start).clamp(0, path.shape[1] - 1))
    keys = torch.where(column < start, column, start + node).clamp(max=weights.shape[3] - 1)
    return queries.gather(3, keys[:, None, None].expand(-1, weights.shape[1], path.shape[1], -1))


def _by_step(rows: list[list[torch.Tensor]]) -> tuple[torch.Tensor, ...]:
    """Per-row lists of `[vocab]` to plain generate's form: one `[batch, vocab]` a step; ended rows get zeros."""
    steps = max(map(len, rows))
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(steps))
