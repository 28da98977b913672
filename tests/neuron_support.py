"""What the Neuron tests share: graphs run without compiling them, and drafts that know the answer."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from support import make_draft, make_target, texts_of

from eagle3_hf.neuron import Eagle3NeuronModelForCausalLM
from eagle3_hf.neuron.backends.base import Backend, Compiled, SingleFileBackend
from eagle3_hf.neuron.generation import Generation
from eagle3_hf.neuron.parallel import Group

LENGTH, BUCKETS, DRAFTS = 40, [8, 16], 3

# Every operator that the graphs may have. All of them have an XLA lowering; what is new here must be checked for one.
ALLOWED = {
    "__or__", "_assert_tensor_metadata", "add", "alias", "arange", "argmax", "bitwise_not", "cat", "chunk", "clamp",
    "cos", "cumsum", "embedding", "eq", "expand", "flatten", "full_like", "gather", "getitem", "index_select", "le",
    "linear", "lt", "mean", "mul", "ne", "neg", "ones_like", "repeat", "reshape", "rsqrt",
    "scaled_dot_product_attention",
    "scatter", "select", "silu", "sin", "slice", "square", "stack", "sub", "sum", "to", "transpose", "unsqueeze",
    "view", "where",
}  # fmt: skip


def short_names(operators):
    """Names of exported operators without namespace and overload; Python's own `getitem` of tuples too."""
    return {name.split(".")[1] if "." in name else "getitem" for name in operators}


class InProcessBackend(SingleFileBackend):
    """Runs the graphs' functions as they are: what a compiler is handed, without its minutes."""

    name = "torch-export"
    suffix = "txt"

    def __init__(self):
        self.graphs: dict[str, Any] = {}

    def check_available(self):
        pass

    def compile(self, graph, stored, path):
        path.write_text(graph.name)
        self.graphs[graph.name] = graph
        return Compiled(path)

    def load(self, path: Path, entry, weights, options):
        graph = self.graphs[path.read_text()]

        def run(inputs, memory):
            with torch.no_grad():
                outputs, new = graph.function(weights, inputs, memory)
            for spec, tensor in zip((*graph.outputs, *graph.memory), (*outputs, *new)):
                spec.check(tensor)
            return [*outputs, *new]

        return run


# Collectives by hand: all ranks are one axis of `vmap`, which a sum adds up and a gather lays side by side.
@torch.library.custom_op("eagle3_test::sum_ranks", mutates_args=())
def _sum_ranks(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("outside vmap, or of a tensor that is the same on all ranks")


@torch.library.custom_op("eagle3_test::gather_ranks", mutates_args=())
def _gather_ranks(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("outside vmap, or of a tensor that is the same on all ranks")


@_sum_ranks.register_vmap
def _(info, in_dims, x):
    return x.movedim(in_dims[0], 0).sum(0), None


@_gather_ranks.register_vmap
def _(info, in_dims, x):
    return torch.cat(x.movedim(in_dims[0], 0).unbind(), dim=-1), None


class StackedGroup(Group):
    """All ranks in one process, computed side by side."""

    def __init__(self, world):
        self.world = world

    def sum(self, x):
        return _sum_ranks(x)

    def gather(self, x):
        return _gather_ranks(x)

    def run(self, work, *stacks):
        """`work` on each rank's part of dicts of stacked tensors; its results stacked."""
        with torch.no_grad():
            return torch.vmap(work)(*stacks)


def stacked(parts):
    """Dicts of tensors of all ranks as one, with the rank as a first axis."""
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class AllRanksBackend(Backend):
    """Runs the graphs of all ranks side by side, and checks that every rank says the same.

    It holds the memory itself, a part for each rank, as a device does.
    """

    name = "torch-export"
    holds_memory = True

    def group(self, world):
        self.stack = StackedGroup(world)
        return self.stack

    def check_available(self):
        pass

    def compile_all(self, graphs, stored, folder):
        self.graphs = {graph.name: graph for graph in graphs}
        (folder / "graphs.txt").write_text(" ".join(self.graphs))
        return {name: Compiled(folder / "graphs.txt") for name in self.graphs}

    def load_all(self, folder, entries, weights, options):
        specs = {spec.name: spec for graph in self.graphs.values() for spec in graph.memory}
        self.memory = stacked([{name: spec.zeros() for name, spec in specs.items()} for _ in weights])
        held = stacked(weights)
        return {name: partial(self._run, graph, held) for name, graph in self.graphs.items()}

    def _run(self, graph, held, inputs, memory):
        assert not memory

        def work(weights, memory):
            outputs, new = graph.function(
                [weights[name] for name in graph.weights], inputs, [memory[spec.name] for spec in graph.memory]
            )
            return outputs, {spec.name: tensor for spec, tensor in zip(graph.memory, new)}

        outputs, new = self.stack.run(work, held, self.memory)
        self.memory |= new
        for spec, ranks in zip((*graph.outputs, *graph.memory), (*outputs, *new.values())):
            spec.check(ranks[0])
        assert all(torch.equal(ranks[0], other) for ranks in outputs for other in ranks[1:]), "ranks disagree"
        return [ranks[0] for ranks in outputs]


def make_shallow_pair(**changes):
    """A pair whose target has two layers: for tests that compile, which takes seconds a layer."""
    target = make_target("llama", num_hidden_layers=2, **changes)
    return target, make_draft(target, aux_hidden_state_layers=[2, 0, 1])


def make_pair(family="llama", **draft_changes):
    """A tiny target, and a draft for it."""
    changes = {"sliding_window": None, "layer_types": None} if family == "mistral" else {}
    target = make_target(family, **changes)
    return target, make_draft(target, **draft_changes)


def in_process(target, draft, batch=3, runner=None, **options):
    """An exported model whose graphs run uncompiled."""
    values = {"sequence_length": LENGTH, "context_buckets": BUCKETS, "num_speculative_tokens": DRAFTS} | options
    config = Eagle3NeuronModelForCausalLM.get_neuron_config(target, draft, batch_size=batch, **values)
    backend = runner or InProcessBackend()
    with mock.patch("eagle3_hf.neuron.model.get_backend", return_value=backend):
        return Eagle3NeuronModelForCausalLM.export(target, draft, config, load_weights=True)


@contextmanager
def knowing(answers, rate=0.8, seed=0):
    """Put the known answers (texts without padding) in place of the drafts, each token right with this probability.

    Random drafts are nearly always wrong, which would leave acceptance untested.
    """
    chance = random.Random(seed)

    class Knowing(Generation):
        def plant(self, drafts):
            if drafts is None:
                return None
            drafts = drafts.clone()
            for row, text in enumerate(self.texts):
                known = [answer for answer in answers if answer[: len(text)] == text]
                for place, token in enumerate(known[0][len(text) :][: drafts.shape[1]] if known else []):
                    drafts[row, place] = token if chance.random() < rate else (token + 1) % 16
            return drafts

        def _prefill(self):
            return self.plant(super()._prefill())

        def _round(self, last, drafts):
            return self.plant(super()._round(last, drafts))

    with mock.patch("eagle3_hf.neuron.model.Generation", Knowing):
        yield


def assert_same_as_plain(model, target, inputs, new_tokens, rate=0.8, seed=0, **options):
    """Check greedy output against plain `generate()`; returns what speculation did."""
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=new_tokens, **options)
    with knowing(texts_of(plain, inputs), rate, seed):
        fast = model.generate(**inputs, max_new_tokens=new_tokens, **options)
    assert fast.tolist() == plain.tolist()
    return model.speculation_stats
