"""`neuron`: graphs compiled by AWS' neuronx-cc, run on Inferentia and Trainium.

**Never run**: neither the compiler nor the hardware can be had where this package is developed. It is written against
the documented interface of `torch_neuronx.trace` and compiles one graph at a time. Weights and key/value memory are
inputs of each call and its outputs, as in the other backends, which is right but slow: production needs all graphs in
one NxD `ModelBuilder` model that keeps them on the device. That isn't built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..specs import Graph
from .base import Backend, Runner
from .torch_export import operators, trace

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"


class Flat(nn.Module):
    """A graph as a function of one flat list of tensors, which is what the tracer takes."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, inputs = len(self.graph.weights), len(self.graph.inputs)
        given = list(tensors)
        outputs, memory = self.graph.function(
            given[:weights], given[weights : weights + inputs], given[weights + inputs :]
        )
        return (*outputs, *memory)


class NeuronBackend(Backend):
    """Backend `neuron`."""

    name = "neuron"
    suffix = "pt"

    def check_available(self) -> None:
        try:
            importlib.import_module("torch_neuronx")
        except ImportError as error:
            raise ImportError(
                f"backend 'neuron' needs torch_neuronx and neuronx-cc ({str(error).splitlines()[0]}). They come from "
                f"AWS' own index: pip install --extra-index-url {AWS_INDEX} torch-neuronx neuronx-cc. What PyPI has "
                "under these names are empty placeholders. Without them, backend 'torch-export' checks everything up "
                "to the compiler",
                name="torch_neuronx",
            ) from error

    def compile(self, graph: Graph, stored: Mapping[str, torch.Tensor], path: Path) -> dict[str, int]:
        tracer = importlib.import_module("torch_neuronx")
        program = trace(graph, stored)  # first what can be checked without the compiler
        examples = [stored[name] for name in graph.weights]
        examples += [spec.zeros() for spec in (*graph.inputs, *graph.memory)]
        arguments = ["--auto-cast=none"]
        if self.instance_type is not None:
            arguments += ["--target", self.instance_type]
        compiled = tracer.trace(Flat(graph).eval(), tuple(examples), compiler_args=arguments)
        torch.jit.save(compiled, path)
        return operators(program)

    def load(self, path: Path, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        module = torch.jit.load(path)
        held = list(weights)

        def run(inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return list(module(*held, *inputs, *memory))

        return run
