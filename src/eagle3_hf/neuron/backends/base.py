"""What a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..specs import Graph

Runner = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]


class Backend(ABC):
    """Compiles single graphs, and loads them again in another process.

    Attributes:
        name: as in the configuration.
        suffix: of its files.
        instance_type: AWS instance to compile for; `None` leaves it to the compiler.
    """

    name: str
    suffix: str
    instance_type: str | None = None

    @abstractmethod
    def check_available(self) -> None:
        """Raise ImportError, with what to install, where this backend can't run."""

    @abstractmethod
    def compile(self, graph: Graph, stored: Mapping[str, torch.Tensor], path: Path) -> dict[str, int]:
        """Write `graph` to `path`, without its weights; returns how often each operator occurs."""

    @abstractmethod
    def load(self, path: Path, weights: Sequence[torch.Tensor], options: Mapping[str, Any]) -> Runner:
        """Read a graph back.

        Args:
            weights: in the order of the graph's table, already `place`d.
            options: loading options of the user that this backend knows.

        Returns:
            `(inputs, memory) -> [*outputs, *memory]`.
        """

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` where graphs want it."""
        return tensor

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` on the host."""
        return tensor
