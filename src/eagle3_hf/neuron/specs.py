"""The table of graphs: names, inputs, outputs, and which input each output replaces.

Every backend and the manifest are made from this table, so they can't disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from . import draft_graphs, target_graphs
from .buckets import decode_threshold
from .config import Eagle3NeuronConfig
from .families import Models
from .layers import Shape, Weights

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype (`int32`, `float32`, ...) of one input or output."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def zeros(self) -> torch.Tensor:
        """A tensor of this kind."""
        return torch.zeros(self.shape, dtype=getattr(torch, self.dtype))

    def check(self, tensor: torch.Tensor) -> None:
        """ValueError unless `tensor` is of this kind."""
        if tuple(tensor.shape) != self.shape or tensor.dtype != getattr(torch, self.dtype):
            raise ValueError(
                f"input {self.name} must be {self.dtype} {list(self.shape)}, got "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )


@dataclass(frozen=True)
class Graph:
    """One graph before compilation.

    Attributes:
        name: also the file's name.
        inputs, outputs: without the key/value memory.
        memory: keys and values it takes; it gives the same ones back, in this order, after `outputs`.
        weights: stored names of the weights it reads, in the order they are passed.
        function: `(weights, inputs, memory) -> (outputs, memory)`, all lists of tensors.
        world: ranks that run it together; sizes and weights are one rank's.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    memory: tuple[TensorSpec, ...]
    weights: tuple[str, ...]
    function: Callable[[Tensors, Tensors, Tensors], tuple[list[torch.Tensor], list[torch.Tensor]]]
    world: int = 1

    @property
    def aliases(self) -> dict[int, int]:
        """Which memory input (its number among `memory`) becomes which output (among all outputs)."""
        return {i: len(self.outputs) + i for i in range(len(self.memory))}


def memory_specs(who: str, shape: Shape, config: Eagle3NeuronConfig) -> tuple[TensorSpec, ...]:
    """Keys and values of layer 0, of layer 1, ...: `[batch, kv_heads, sequence_length, head_dim]` each."""
    size = (config.batch_size, shape.num_kv_heads, config.sequence_length, shape.head_dim)
    return tuple(
        TensorSpec(f"{who}.{what}.{i}", size, config.torch_dtype)
        for i in range(shape.num_layers)
        for what in ("keys", "values")
    )


def graph_name(kind: str, size: int | None = None, read: int | None = None, config: Any = None) -> str:
    """`target_prefill_64`, `target_verify`; with several `kv_buckets` also `target_verify_kv128`."""
    name = kind if size is None else f"{kind}_{size}"
    return f"{name}_kv{read}" if read is not None and len(config.kv_buckets) > 1 else name


class GraphTable:
    """Makes every graph that `config` asks for.

    Args:
        models: the pair, `fit` for `config`.
        config: what to compile for.

    Raises:
        ValueError: the target has fewer positions than `sequence_length`.
    """

    def __init__(self, models: Models, config: Eagle3NeuronConfig):
        limit = getattr(models.target_config, "max_position_embeddings", None)
        if limit is not None and config.sequence_length > limit:
            raise ValueError(
                f"sequence_length {config.sequence_length} is above the target's {limit} positions "
                "(max_position_embeddings)"
            )
        self.models, self.config = models, config
        self.features = len(models.aux_layers) * models.target_shape.hidden_size
        self.target_memory = memory_specs("target", models.target_shape, config)
        self.draft_memory = memory_specs("draft", models.draft_shape, config)
        self.target_weights = list(models.target_names.items())
        self.draft_weights = list(models.draft_names.items())

    def _int(self, name: str, *size: int) -> TensorSpec:
        return TensorSpec(name, (self.config.batch_size, *size), "int32")

    def _float(self, name: str, *size: int) -> TensorSpec:
        return TensorSpec(name, (self.config.batch_size, *size), self.config.torch_dtype)

    def _sampling(self, places: int) -> tuple[TensorSpec, ...]:
        if not self.config.do_sample:
            return ()
        batch = self.config.batch_size
        return (TensorSpec("temperature", (batch,), "float32"), TensorSpec("uniforms", (batch, places), "float32"))

    def _graph(
        self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], who: str, run: Any
    ) -> Graph:
        """Bind `run(inputs, target_weights, draft_weights, memory)` to flat lists of weights."""
        with_target, with_draft = "t" in who, "d" in who
        target = self.target_weights if with_target else []
        draft = self.draft_weights if with_draft else []
        stored = tuple(dict.fromkeys(place for _, place in [*target, *draft]))
        at = {place: i for i, place in enumerate(stored)}

        def function(weights: Tensors, given: Tensors, memory: Tensors) -> tuple[list, list]:
            by_target = {own: weights[at[place]] for own, place in target}
            by_draft = {own: weights[at[place]] for own, place in draft}
            made, new = run(given, by_target, by_draft, memory)
            return list(made), list(new)

        memory = (self.target_memory if with_target else ()) + (self.draft_memory if with_draft else ())
        world = self.config.tensor_parallel_size
        return Graph(name, tuple(inputs), tuple(outputs), memory, stored, function, world)

    def prefill(self, size: int) -> Graph:
        """`target_prefill_S`."""
        models = self.models

        def run(given: Tensors, target: Weights, draft: Weights, memory: Tensors) -> Any:
            ids, lengths, *sampling = given
            token, aux, new = target_graphs.prefill(
                ids, lengths, sampling, target, models.target_shape, models.aux_layers, memory
            )
            return (token, aux), new

        inputs = (self._int("ids", size), self._int("lengths"), *self._sampling(1))
        outputs = (self._int("next"), self._float("aux", size, self.features))
        return self._graph(graph_name("target_prefill", size), inputs, outputs, "t", run)

    def verify(self, draft_tokens: int, read: int) -> Graph:
        """`target_verify`, or with no draft tokens `target_decode`."""
        models, width = self.models, 1 + draft_tokens

        def run(given: Tensors, target: Weights, draft: Weights, memory: Tensors) -> Any:
            ids, positions, *sampling = given
            out, count, chosen, aux, new = target_graphs.verify(
                ids, positions, sampling, target, models.target_shape, models.aux_layers, read, memory
            )
            return ((out, count, chosen, aux) if draft_tokens else (out,)), new

        inputs = (self._int("ids", width), self._int("positions"), *self._sampling(width))
        outputs: tuple[TensorSpec, ...] = (self._int("out", width),)
        if draft_tokens:
            outputs += (self._int("count"), self._int("chosen", width), self._float("aux", width, self.features))
        kind = "target_verify" if draft_tokens else "target_decode"
        return self._graph(graph_name(kind, None, read, self.config), inputs, outputs, "t", run)

    def propose(self, size: int, read: int, in_round: bool) -> Graph:
        """`draft_propose_S`, or `draft_prefill_S` where the draft's loop isn't fused."""
        models, config = self.models, self.config

        def run(given: Tensors, target: Weights, draft: Weights, memory: Tensors) -> Any:
            tokens, features, positions, counts = given
            shared = (models.draft_config, models.draft_shape, read, memory)
            if not config.fuse_draft_loop:
                token, state, new = draft_graphs.context(tokens, features, positions, counts, draft, *shared)
                return (token, state), new
            drafts, new = draft_graphs.propose(
                tokens, features, positions, counts, config.num_speculative_tokens, draft, *shared
            )
            return (drafts,), new

        inputs = (
            self._int("tokens", size),
            self._float("features", size, self.features),
            self._int("positions"),
            self._int("counts"),
        )
        if config.fuse_draft_loop:
            kind = "draft_propose"
            outputs: tuple[TensorSpec, ...] = (self._int("drafts", config.num_speculative_tokens),)
        else:
            kind = "draft_prefill"
            outputs = (self._int("draft"), self._float("state", models.draft_shape.hidden_size))
        name = graph_name(f"{kind}_round", None, read, config) if in_round else graph_name(kind, size)
        return self._graph(name, inputs, outputs, "d", run)

    def recurrent(self, read: int) -> Graph:
        """`draft_recurrent`, where the draft's loop isn't fused."""
        models = self.models
        state = self._float("state", models.draft_shape.hidden_size)

        def run(given: Tensors, target: Weights, draft: Weights, memory: Tensors) -> Any:
            token, before, positions = given
            token, after, new = draft_graphs.recurrent(
                token, before, positions, draft, models.draft_config, models.draft_shape, read, memory
            )
            return (token, after), new

        inputs = (self._int("draft"), state, self._int("positions"))
        name = graph_name("draft_recurrent", None, read, self.config)
        return self._graph(name, inputs, (self._int("draft"), state), "d", run)

    def fused(self, read: int) -> Graph:
        """`fused_step`: verification, rejection and the next drafts in one graph."""
        models, config = self.models, self.config
        drafts, split = config.num_speculative_tokens, len(self.target_memory)

        def run(given: Tensors, target: Weights, draft: Weights, memory: Tensors) -> Any:
            ids, positions, *sampling = given
            out, count, chosen, aux, new = target_graphs.verify(
                ids, positions, sampling, target, models.target_shape, models.aux_layers, read, memory[:split]
            )
            shared = (draft, models.draft_config, models.draft_shape, read, memory[split:])
            made, behind = draft_graphs.propose(chosen, aux, positions, count, drafts, *shared)
            return (out, count, made), [*new, *behind]

        inputs = (self._int("ids", 1 + drafts), self._int("positions"), *self._sampling(1 + drafts))
        outputs = (self._int("out", 1 + drafts), self._int("count"), self._int("drafts", drafts))
        return self._graph(graph_name("fused_step", None, read, config), inputs, outputs, "td", run)

    def all(self) -> list[Graph]:
        """Every graph, in the order of warm-up."""
        config, drafts = self.config, self.config.num_speculative_tokens
        contexts, reads = config.context_buckets or [], config.kv_buckets or []
        made = [self.prefill(size) for size in contexts]
        # A prompt's drafts never look further than the prompt and themselves.
        made += [self.propose(size, min(config.sequence_length, size + drafts), in_round=False) for size in contexts]
        rounds: list[Callable[..., Graph]] = [partial(self.verify, drafts), partial(self.verify, 0)]
        if config.fuse_step:
            rounds = [self.fused, partial(self.verify, 0)]
        else:
            rounds.append(partial(self.propose, decode_threshold(drafts), in_round=True))
        if not config.fuse_draft_loop:
            rounds.append(self.recurrent)
        return made + [make(read=read) for make in rounds for read in reads]
