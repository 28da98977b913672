"""`xla`: graphs as HLO protos made by torch_xla, which is what AWS' compiler is handed; run on the CPU by XLA.

A proto holds no weights. It is compiled once, when its graph is first run; `no_compiling` watches torch_xla's own
counter. Needs torch 2.9.1 and torch_xla 2.9.0, which go together only with each other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..specs import Graph
from .base import Compiled, Runner, SingleFileBackend

if TYPE_CHECKING:
    from ..artefact import Entry

_INSTALL = "pip install torch==2.9.1 torch-xla==2.9.0 'numpy<2.4'"
_OPCODE = re.compile(r"\bopcode: \"([a-z0-9-]+)\"")


def _module(name: str) -> Any:
    return importlib.import_module(name)


def compiles() -> int:
    """How many programs torch_xla has compiled in this process."""
    found = _module("torch_xla.debug.metrics").metric_data("CompileTime")
    return 0 if found is None else found[0]


def fallbacks() -> dict[str, int]:
    """Operators that torch_xla has handed back to PyTorch in this process, and how often."""
    metrics = _module("torch_xla.debug.metrics")
    return {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}


class XlaBackend(SingleFileBackend):
    """Backend `xla`."""

    name = "xla"
    suffix = "hlo"

    def check_available(self) -> None:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        try:
            _module("torch_xla")
        except ImportError as error:
            raise ImportError(
                f"backend 'xla' needs torch_xla 2.9.0 with torch 2.9.1 ({str(error).splitlines()[0]}; torch here is "
                f"{torch.__version__}): {_INSTALL}, in an environment of its own",
                name="torch_xla",
            ) from error

    @property
    def device(self) -> torch.device:
        return _module("torch_xla").device()

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def compile(self, graph: Graph, stored: Mapping[str, torch.Tensor], path: Path) -> Compiled:
        native = _module("torch_xla")._XLAC
        # zeros of the weights' shapes: only shapes go into a proto.
        weights = [torch.zeros_like(stored[name]) for name in graph.weights]
        given = [spec.zeros() for spec in (*graph.inputs, *graph.memory)]
        placed = [self.place(tensor) for tensor in (*weights, *given)]
        _module("torch_xla").sync()
        before = fallbacks()
        split = len(weights), len(weights) + len(graph.inputs)
        with torch.no_grad():
            outputs, memory = graph.function(placed[: split[0]], placed[split[0] : split[1]], placed[split[1] :])
        if (handed := fallbacks()) != before:
            raise RuntimeError(f"graph {graph.name} has operators without an XLA lowering: {handed}")
        context = native.lowering.LoweringContext(graph.name)
        context.build([*outputs, *memory])
        path.write_bytes(context.hlo())
        counts = Counter(_OPCODE.findall(context.hlo_text()))
        return Compiled(path, dict(sorted(counts.items())), _parameters(graph, context, placed))

    def load(self, path: Path, entry: Entry, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        native, device = _module("torch_xla")._XLAC, self.device
        computation = _module("torch_xla.core.xla_builder").computation_from_module_proto(path.stem, path.read_bytes())
        held, order = list(weights), entry.parameters or ()
        constants = {
            at: self.place(torch.tensor(value[1], dtype=getattr(torch, value[0])))
            for at, value in enumerate(order)
            if not isinstance(value, int)
        }

        def run(inputs: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            given = [*held, *inputs, *memory]
            taken = [given[place] if isinstance(place, int) else constants[at] for at, place in enumerate(order)]
            made = native._xla_user_computation(f"xla::{path.stem}", taken, computation)
            # Only these outputs: a step marker would compile whatever else is pending into the same program.
            native._xla_sync_multi(made, devices=[str(device)], wait=False, sync_xla_data=True)
            return list(made)

        return run

    @contextlib.contextmanager
    def no_compiling(self) -> Iterator[None]:
        before = compiles()
        yield
        if compiles() != before:
            raise RuntimeError("a graph was compiled anew after warm-up")


def _parameters(graph: Graph, context: Any, placed: Sequence[torch.Tensor]) -> tuple[int | tuple[str, float], ...]:
    """Which of `placed` each parameter of the HLO is; torch_xla makes parameters of most numbers in the code as well.

    Raises:
        RuntimeError: something larger than a number got in.
    """
    places = {context.tensor_parameter_id(tensor): place for place, tensor in enumerate(placed)}
    made: list[int | tuple[str, float]] = []
    for number, value in sorted(context.parameter_id_tensor_mapping().items()):
        if number in places:
            made.append(places[number])
            continue
        if value.dim():
            raise RuntimeError(f"graph {graph.name} isn't weight-free: a tensor {list(value.shape)} is baked in")
        made.append((str(value.dtype).removeprefix("torch."), value.item()))
    return tuple(made)
