"""Backends: what turns a graph into a file, and the file into something that can be called."""

from __future__ import annotations

import importlib

from .base import Backend, Compiled, Runner

_PLACES = {
    "torch-export": ("torch_export", "TorchExportBackend"),
    "xla": ("xla", "XlaBackend"),
    "neuron": ("neuron", "NeuronBackend"),
}

__all__ = ["Backend", "Compiled", "Runner", "get_backend"]


def get_backend(name: str, instance_type: str | None = None) -> Backend:
    """The backend called `name`, checked to be usable here.

    Raises:
        ValueError: no such backend.
        ImportError: its packages are missing; the message says where they come from.
    """
    if name not in _PLACES:
        raise ValueError(f"backend must be one of {', '.join(_PLACES)}, got {name!r}")
    module, kind = _PLACES[name]
    backend: Backend = getattr(importlib.import_module(f".{module}", __name__), kind)()
    backend.instance_type = instance_type
    backend.check_available()
    return backend
