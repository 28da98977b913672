"""Running compiled graphs: memory, warm-up, and the calls of one round. Knows nothing of texts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .artefact import Entry, Manifest, read_weights
from .backends import Backend
from .buckets import pick
from .specs import graph_name

# Once is not enough: some runtimes compile again when a graph first gets its own output as memory.
_WARM_UP_CALLS = 2


class GraphRuntime:
    """Compiled graphs of one pair, with the key/value memory they share.

    Args:
        folder: of the export, already checked.
        manifest: its manifest.
        backend: the one that compiled it.
        options: loading options for the backend.
    """

    def __init__(self, folder: Path, manifest: Manifest, backend: Backend, options: Mapping[str, Any]):
        self.config, self.entries, self.backend = manifest.compiled, manifest.graphs, backend
        world = self.config.tensor_parallel_size
        weights = [read_weights(folder, rank, world) for rank in backend.ranks(world)]
        try:
            self._run = backend.load_all(folder, self.entries, weights, options)
        except Exception as error:
            made = manifest.versions.get("torch")
            if made == torch.__version__:
                raise
            raise RuntimeError(
                f"graphs exported with torch {made} can't be read by torch {torch.__version__} here, export again with "
                f"this one: {error}"
            ) from error
        self.memory: dict[str, torch.Tensor] = {}
        self.calls: dict[str, int] = dict.fromkeys(self.entries, 0)
        self.warm = False
        self.reset()

    def reset(self) -> None:
        """Forget all keys and values.

        Where the device holds them, it keeps them: what an earlier text left isn't visible to the next.
        """
        if self.backend.holds_memory:
            return
        specs = {spec.name: spec for entry in self.entries.values() for spec in entry.memory}
        # zeros: a slot that nobody wrote is multiplied by a zero attention weight, and 0 * nan is nan.
        self.memory = {name: self.backend.place(spec.zeros()) for name, spec in specs.items()}

    def call(self, name: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run graph `name`; the memory moves on, the other outputs are returned (on the device).

        Raises:
            ValueError: an input of another shape or dtype than the graph was compiled for.
            RuntimeError: something was compiled anew after warm-up.
        """
        entry: Entry = self.entries[name]
        if len(inputs) != len(entry.inputs):
            raise ValueError(f"graph {name} takes {len(entry.inputs)} inputs, got {len(inputs)}")
        for spec, tensor in zip(entry.inputs, inputs):
            spec.check(tensor)
        kept = () if self.backend.holds_memory else entry.memory
        memory = [self.memory[spec.name] for spec in kept]
        with self.backend.no_compiling() if self.warm else contextlib.nullcontext():
            made = self._run[name]([self.backend.place(tensor) for tensor in inputs], memory)
        for i, spec in enumerate(kept):
            self.memory[spec.name] = made[entry.aliases[i]]
        self.calls[name] += 1
        return made[: len(entry.outputs)]

    def warm_up(self) -> None:
        """Run every graph of both models on made-up inputs; from then on, compiling anything is an error."""
        for _ in range(_WARM_UP_CALLS):
            for name, entry in self.entries.items():
                self.call(name, [torch.ones_like(spec.zeros()) for spec in entry.inputs])
        self.calls = dict.fromkeys(self.entries, 0)
        self.reset()
        self.warm = True

    def _sampling(self, sampling: Any, places: int) -> list[torch.Tensor]:
        drawn = [] if sampling is None else sampling.draw(self.config.batch_size, places)
        return [self.backend.agree(tensor) for tensor in drawn]

    def prefill(self, ids: torch.Tensor, lengths: torch.Tensor, sampling: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Read prompts; int32 `[batch, S]` with `S` a bucket, and int32 `[batch]`. Next tokens and aux states."""
        name = graph_name("target_prefill", ids.shape[1])
        token, aux = self.call(name, [ids, lengths, *self._sampling(sampling, 1)])
        return self.backend.fetch(token), aux

    def decode(self, ids: torch.Tensor, positions: torch.Tensor, sampling: Any) -> torch.Tensor:
        """One token a row, int32 `[batch]`, from the last ones `[batch]` at `positions`."""
        name = graph_name("target_decode", None, self._read(positions, 1), self.config)
        return self.backend.fetch(self.call(name, [ids[:, None], positions, *self._sampling(sampling, 1)])[0])[:, 0]

    def _read(self, positions: torch.Tensor, new: int) -> int:
        # A row that isn't in use sits at the scratch slot and needs nothing.
        used = positions[positions < self.config.sequence_length - 1]
        highest = int(used.max()) if len(used) else 0
        needed = min(highest + new, self.config.sequence_length)
        return pick(needed, self.config.kv_buckets or [], "memory length")

    def step(
        self, ids: torch.Tensor, positions: torch.Tensor, sampling: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One round: verify `[batch, 1 + K]` ids from `positions` on, and draft for the next.

        Returns:
            new tokens int32 `[batch, 1 + K]` with -1 behind them, how many `[batch]`, next drafts `[batch, K]`.
        """
        config, width = self.config, ids.shape[1]
        # The drafts that follow may reach K slots past the last accepted token.
        read = self._read(positions, width + config.num_speculative_tokens)
        given = [ids, positions, *self._sampling(sampling, width)]
        fetch = self.backend.fetch
        if config.fuse_step:
            out, count, drafts = self.call(graph_name("fused_step", None, read, config), given)
            return fetch(out), fetch(count), fetch(drafts)
        out, count, chosen, aux = self.call(graph_name("target_verify", None, read, config), given)
        drafts = self.propose(chosen, aux, positions, count, in_round=True)
        return fetch(out), fetch(count), drafts

    def propose(
        self,
        tokens: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        counts: torch.Tensor,
        in_round: bool = False,
    ) -> torch.Tensor:
        """Drafts int32 `[batch, K]`, after taking in `counts` features from `positions` on.

        Args:
            in_round: the features are a verification's, not a prompt's in its bucket.
        """
        config, width = self.config, tokens.shape[1]
        drafts = config.num_speculative_tokens
        kind = "draft_propose" if config.fuse_draft_loop else "draft_prefill"
        read = self._read(positions, width + drafts)
        if in_round:
            name = graph_name(f"{kind}_round", None, read, config)
        else:
            name = graph_name(kind, width)
        made = self.call(name, [tokens, features, positions, counts])
        if config.fuse_draft_loop:
            return self.backend.fetch(made[0])
        token, state = made
        found, last = [self.backend.fetch(token)], positions + self.backend.fetch(counts) - 1
        for depth in range(1, drafts):
            name = graph_name("draft_recurrent", None, read, config)
            token, state = self.call(name, [found[-1], state, last + depth])
            found.append(self.backend.fetch(token))
        return torch.stack(found, dim=1)
