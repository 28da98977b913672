"""What a backend is."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..parallel import ALONE, Group
from ..specs import Graph

if TYPE_CHECKING:
    from ..artefact import Entry

Runner = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Compiled:
    """What became of a graph.

    Attributes:
        path: its file, which graphs may share.
        operators: how often each operator occurs in it.
        parameters: where the compiled program doesn't take weights, inputs and memory in this order: for each of its
            parameters the place in that order, or a number that it takes, as dtype and value.
    """

    path: Path
    operators: dict[str, int] = field(default_factory=dict)
    parameters: tuple[int | tuple[str, float], ...] | None = None


class Backend(ABC):
    """Compiles graphs, and loads them again in another process.

    Attributes:
        name: as in the configuration.
        instance_type: AWS instance to compile for; `None` leaves it to the compiler.
        holds_memory: the device keeps keys and values: they are neither passed to a runner nor returned.
    """

    name: str
    instance_type: str | None = None
    holds_memory = False

    @abstractmethod
    def check_available(self) -> None:
        """Raise ImportError, with what to install, where this backend can't run."""

    def group(self, world: int) -> Group:
        """The collectives that go into the graphs of `world` ranks."""
        if world > 1:
            raise ValueError(f"backend {self.name!r} can't split a model over {world} cores")
        return ALONE

    def ranks(self, world: int) -> list[int]:
        """The ranks whose weights this process loads."""
        return list(range(world))

    @abstractmethod
    def compile_all(self, graphs: Sequence[Graph], stored: Weights, folder: Path) -> dict[str, Compiled]:
        """Write all graphs into `folder`, without their weights.

        Args:
            stored: one rank's weights, for their shapes.
        """

    @abstractmethod
    def load_all(
        self, folder: Path, entries: Mapping[str, Entry], weights: Sequence[Weights], options: Mapping[str, Any]
    ) -> dict[str, Runner]:
        """Read all graphs back.

        Args:
            folder: of the export.
            weights: of each of `ranks`, on the host.
            options: loading options of the user that this backend knows.

        Returns:
            For each graph `(inputs, memory) -> [*outputs, *memory]`.
        """

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` where graphs want it."""
        return tensor

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on the host."""
        return tensor

    def agree(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's `tensor` on every rank: what the host drew must be the same for all."""
        return tensor

    def no_compiling(self) -> AbstractContextManager[Any]:
        """Whatever compiles inside is a RuntimeError."""
        return contextlib.nullcontext()


class SingleFileBackend(Backend):
    """A backend that compiles graph by graph, each into a file of its own.

    Attributes:
        suffix: of the files.
    """

    suffix: str

    @abstractmethod
    def compile(self, graph: Graph, stored: Weights, path: Path) -> Compiled:
        """Write `graph` to `path`."""

    @abstractmethod
    def load(self, path: Path, entry: Entry, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        """Read a graph back; `weights` are in the order of the graph's table, already `place`d."""

    def compile_all(self, graphs: Sequence[Graph], stored: Weights, folder: Path) -> dict[str, Compiled]:
        place = folder / "graphs"
        place.mkdir(exist_ok=True)
        return {graph.name: self.compile(graph, stored, place / f"{graph.name}.{self.suffix}") for graph in graphs}

    def load_all(
        self, folder: Path, entries: Mapping[str, Entry], weights: Sequence[Weights], options: Mapping[str, Any]
    ) -> dict[str, Runner]:
        (own,) = weights
        placed = {name: self.place(tensor) for name, tensor in own.items()}
        return {
            name: self.load(folder / entry.file, entry, [placed[place] for place in entry.weights], options)
            for name, entry in entries.items()
        }
