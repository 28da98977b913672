"""`torch-export`: graphs as `torch.export` programs, run on the CPU.

It needs nothing but torch, and proves what a Neuron compiler needs: static shapes, no mutation, no values read on the
host. What it runs is PyTorch's own kernels, so it says nothing about speed on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..parallel import ALONE, DistributedGroup, Group
from ..specs import Graph
from .base import Compiled, Runner, SingleFileBackend

if TYPE_CHECKING:
    from ..artefact import Entry


class Lifted(nn.Module):
    """A graph as a module without parameters: weights are inputs, so no file holds a copy of them."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.function = graph.function

    def forward(
        self, weights: list[torch.Tensor], inputs: list[torch.Tensor], memory: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        outputs, new = self.function(weights, inputs, memory)
        return [*outputs, *new]


def example_arguments(graph: Graph, stored: Mapping[str, torch.Tensor]) -> tuple[list, list, list]:
    """Weights, inputs and memory of the graph's shapes."""
    weights = [stored[name] for name in graph.weights]
    return weights, [spec.zeros() for spec in graph.inputs], [spec.zeros() for spec in graph.memory]


def trace(graph: Graph, stored: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """Export `graph`, and check what the design promises of it.

    Raises:
        RuntimeError: a dynamic shape or a mutation got in, or weights were baked in.
    """
    with torch.no_grad():
        program = torch.export.export(Lifted(graph), example_arguments(graph, stored), strict=False)
    signature = program.graph_signature
    mutated = signature.buffers_to_mutate or signature.user_inputs_to_mutate
    if program.range_constraints or mutated or program.state_dict:
        raise RuntimeError(f"graph {graph.name} isn't a static function of its inputs: {signature}")
    return program


def operators(program: torch.export.ExportedProgram) -> dict[str, int]:
    """How often each operator occurs in a program."""
    calls = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return dict(sorted(Counter(calls).items()))


class TorchExportBackend(SingleFileBackend):
    """Backend `torch-export`. Loading option: `torch_compile`, a `torch.compile` backend or a callable.

    Graphs for several ranks run in as many processes, joined by `torch.distributed`.
    """

    name = "torch-export"
    suffix = "pt2"

    def __init__(self) -> None:
        self.world = 1

    def check_available(self) -> None:
        """torch is always there."""

    def group(self, world: int) -> Group:
        return DistributedGroup(world) if world > 1 else ALONE

    def ranks(self, world: int) -> list[int]:
        """This process' own rank.

        Raises:
            RuntimeError: `torch.distributed` isn't set up for as many ranks.
        """
        self.world = world
        if world == 1:
            return [0]
        has = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 0
        if has != world:
            raise RuntimeError(
                f"these graphs were compiled for {world} cores, which backend 'torch-export' runs as {world} processes "
                f"(torch.distributed has {has or 'none'} here): start them with torchrun --nproc-per-node {world}, and "
                'call torch.distributed.init_process_group("gloo") first'
            )
        return [torch.distributed.get_rank()]

    def compile(self, graph: Graph, stored: Mapping[str, torch.Tensor], path: Path) -> Compiled:
        program = trace(graph, stored)
        # torch saves the example inputs beside the program, which here are all the weights once more.
        program._example_inputs = None
        torch.export.save(program, path)
        return Compiled(path, operators(program))

    def load(self, path: Path, entry: Entry, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        module: Callable = torch.export.load(path).module()
        if options.get("torch_compile"):
            module = torch.compile(module, fullgraph=True, dynamic=False, backend=options["torch_compile"])
        held = list(weights)

        def run(inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with torch.no_grad():
                return module(held, list(inputs), list(memory))

        return run

    def agree(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.world > 1:
            torch.distributed.broadcast(tensor, 0)
        return tensor

    def no_compiling(self) -> AbstractContextManager[Any]:
        return torch.compiler.set_stance("fail_on_recompile")
