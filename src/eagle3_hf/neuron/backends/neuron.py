"""`neuron`: all graphs in one NxD model, compiled by AWS' neuronx-cc, run on Inferentia and Trainium.

**Never run**: neither the compiler nor the hardware can be had where this package is developed. It is written against
the sources that optimum-neuron 0.4.5 pins: `neuronx_distributed` 0.15 (tag v2.26.0), `trace/model_builder.py` and
`trace/spmd.py`, used as optimum-neuron's `backend/pretrained_model.py` uses them. `torch_neuronx` is closed; what is
known of it here is how those two call it. What follows from the sources:

- The model holds the key/value memory: parameters aliased to outputs are its state. The state is laid out after the
  graph that was added first, so that one aliases the memory of both models, whatever it reads.
- A call is routed by the shapes of its inputs alone, and different graphs have the same. So each takes one input more,
  of a length that is its own.
- Outputs are packed as those of the first graph, so all graphs return equally many.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..parallel import ALONE, Group
from ..specs import Graph, TensorSpec
from .base import Backend, Compiled, Runner

if TYPE_CHECKING:
    from ..artefact import Entry

AWS_INDEX = "https://pip.repos.neuron.amazonaws.com"
MODEL_FILE = "model.pt"
_PACKAGES = ("torch_neuronx", "neuronx_distributed")
_NO_OUTPUT = TensorSpec("nothing", (1,), "int32")
# Trainium 2 joins two physical cores to one, as optimum-neuron compiles for it.
_CORES_JOINED = {"trn2": 2}


def parameter_name(name: str) -> str:
    """A stored name as the name of a module's parameter, which may have no dots."""
    return name.replace(".", "__")


def whole_memory(graphs: Sequence[Graph]) -> list[Graph]:
    """The same graphs, the first of them extended to hand on all memory that any of them has."""
    first, *rest = graphs
    known = {spec.name for spec in first.memory}
    others = tuple({spec.name: spec for graph in rest for spec in graph.memory if spec.name not in known}.values())
    own = len(first.memory)

    def function(
        weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, new = first.function(weights, inputs, memory[:own])
        return outputs, [*new, *memory[own:]]

    return [replace(first, memory=first.memory + others, function=function), *rest]


class GraphModule(nn.Module):
    """A graph as the module that NxD traces: weights and memory are parameters, inputs positional.

    Args:
        graph: one rank's.
        stored: that rank's weights, for shapes and dtypes; their values aren't used.
        outputs: how many to return besides the memory; what is missing is filled up.
    """

    def __init__(self, graph: Graph, stored: Mapping[str, torch.Tensor], outputs: int):
        super().__init__()
        self.graph, self.fill = graph, outputs - len(graph.outputs)
        for name in graph.weights:
            self._add(name, torch.zeros_like(stored[name]))
        for spec in graph.memory:
            self._add(spec.name, spec.zeros())

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.register_parameter(parameter_name(name), nn.Parameter(tensor, requires_grad=False))

    def held(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The parameters of these stored names."""
        return [getattr(self, parameter_name(name)) for name in names]

    @property
    def memory(self) -> list[torch.Tensor]:
        return self.held([spec.name for spec in self.graph.memory])

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        """The graph's inputs, and last the one that it is routed by."""
        *given, route = inputs
        outputs, memory = self.graph.function(self.held(self.graph.weights), given, self.memory)
        # Used, so that nothing takes it out: the first output of every graph is a tensor of ids.
        outputs = [outputs[0] + route[:1] * 0, *outputs[1:]]
        outputs += [torch.zeros(_NO_OUTPUT.shape, dtype=torch.int32, device=route.device)] * self.fill
        return [*outputs, *memory]

    def aliases(self) -> dict[torch.Tensor, int]:
        """Which output each parameter of the memory becomes: the graph's own table, behind the filled-up outputs."""
        return {self.memory[i]: output + self.fill for i, output in self.graph.aliases.items()}


def routes(graphs: Iterable[str]) -> dict[str, torch.Tensor]:
    """For each graph the input that only it has in this length: int32 zeros `[1]`, `[2]`, ..., in any order given."""
    return {name: torch.zeros(place, dtype=torch.int32) for place, name in enumerate(sorted(graphs), start=1)}


def example_inputs(graph: Graph, route: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inputs of a graph's shapes."""
    return (*(spec.zeros() for spec in graph.inputs), route)


def compiler_arguments(instance_type: str | None) -> str:
    """Of neuronx-cc. No casting: a graph is compiled in the dtype that it was exported in."""
    arguments = f"--auto-cast=none --model-type=transformer -O1 --lnc={_CORES_JOINED.get(instance_type or '', 1)}"
    return arguments if instance_type is None else f"{arguments} --target {instance_type}"


class NxDGroup(Group):
    """NxD's tensor-parallel group, while a graph is traced."""

    def __init__(self, world: int):
        self.world = world

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        mappings = importlib.import_module("neuronx_distributed.parallel_layers.mappings")
        return mappings.reduce_from_tensor_model_parallel_region(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        mappings = importlib.import_module("neuronx_distributed.parallel_layers.mappings")
        return mappings.gather_from_tensor_model_parallel_region(x)


class NeuronBackend(Backend):
    """Backend `neuron`."""

    name = "neuron"
    holds_memory = True

    def check_available(self) -> None:
        for package in _PACKAGES:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise ImportError(
                    f"backend 'neuron' needs torch_neuronx, neuronx_distributed and neuronx-cc "
                    f"({str(error).splitlines()[0]}). They come from AWS' own index: pip install --extra-index-url "
                    f"{AWS_INDEX} torch-neuronx neuronx-distributed neuronx-cc. What PyPI has under these names are "
                    "empty placeholders. Without them, the backends 'torch-export' and 'xla' check everything up to "
                    "the compiler",
                    name=package,
                ) from error

    def group(self, world: int) -> Group:
        return NxDGroup(world) if world > 1 else ALONE

    def compile_all(
        self, graphs: Sequence[Graph], stored: Mapping[str, torch.Tensor], folder: Path
    ) -> dict[str, Compiled]:
        builders = importlib.import_module("neuronx_distributed.trace.model_builder")
        world = max(graph.world for graph in graphs)
        outputs = max(len(graph.outputs) for graph in graphs)
        taken = routes(graph.name for graph in graphs)
        arguments = compiler_arguments(self.instance_type)
        with tempfile.TemporaryDirectory(prefix="eagle3-neuronx-cc-") as work:
            builder = builders.ModelBuilder(
                router=None,
                tp_degree=world,
                checkpoint_loader=None,
                # It is deleted by the builder before use.
                compiler_workdir=str(Path(work) / "compiler"),
                logical_nc_config=_CORES_JOINED.get(self.instance_type or "", 1),
            )
            for graph in whole_memory(graphs):
                builder.add(
                    key=graph.name,
                    model_instance=_instance(builders.BaseModelInstance, graph, stored, outputs),
                    example_inputs=[example_inputs(graph, taken[graph.name])],
                    compiler_args=arguments,
                )
            model = builder.trace(initialize_model_weights=False)
        path = folder / MODEL_FILE
        torch.jit.save(model, path)
        return {graph.name: Compiled(path) for graph in graphs}

    def load_all(
        self,
        folder: Path,
        entries: Mapping[str, Entry],
        weights: Sequence[Mapping[str, torch.Tensor]],
        options: Mapping[str, Any],
    ) -> dict[str, Runner]:
        model = torch.jit.load(folder / MODEL_FILE)
        named = [{parameter_name(name): tensor for name, tensor in rank.items()} for rank in weights]
        model.nxd_model.initialize(named, torch.zeros(1, dtype=torch.int32))
        taken = routes(entries)
        return {name: partial(_run, model, taken[name], len(entry.outputs)) for name, entry in entries.items()}


def _run(
    model: Any, route: torch.Tensor, count: int, inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    made = model(*inputs, route)
    return [made] if isinstance(made, torch.Tensor) else list(made)[:count]


def _instance(base: type, graph: Graph, stored: Mapping[str, torch.Tensor], outputs: int) -> Any:
    """NxD's `BaseModelInstance` of a graph; its class can't be named before NxD is imported."""

    class Instance(base):  # type: ignore[misc]
        def load_module(self) -> None:
            self.module = GraphModule(graph, stored, outputs).eval()

        def get(self, bucket_rank: int, **kwargs: Any) -> tuple[nn.Module, dict[torch.Tensor, int]]:
            return self.module, self.module.aliases()

    return Instance(GraphModule, {})
