"""`torch-export`: graphs as `torch.export` programs, run on the CPU.

It needs nothing but torch, and proves what a Neuron compiler needs: static shapes, no mutation, no values read on the
host. What it runs is PyTorch's own kernels, so it says nothing about speed on a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..specs import Graph
from .base import Backend, Runner


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


class TorchExportBackend(Backend):
    """Backend `torch-export`. Loading option: `torch_compile`, a `torch.compile` backend or a callable."""

    name = "torch-export"
    suffix = "pt2"

    def check_available(self) -> None:
        """torch is always there."""

    def compile(self, graph: Graph, stored: Mapping[str, torch.Tensor], path: Path) -> dict[str, int]:
        program = trace(graph, stored)
        # torch saves the example inputs beside the program, which here are all the weights once more.
        program._example_inputs = None
        torch.export.save(program, path)
        return operators(program)

    def load(self, path: Path, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        module: Callable = torch.export.load(path).module()
        if options.get("torch_compile"):
            module = torch.compile(module, fullgraph=True, dynamic=False, backend=options["torch_compile"])
        held = list(weights)

        def run(inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            with torch.no_grad():
                return module(held, list(inputs), list(memory))

        return run
