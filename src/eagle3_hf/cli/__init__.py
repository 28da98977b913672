"""The command line: `eagle3-hf demo | generate | bench | eval | report | inspect | export | probe | regenerate |
extract | export-neuron`.

A command is a function of the same name in a module of the same name, listed in `_COMMANDS`. torch and transformers
are imported inside the functions, so `--help` answers at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_COMMANDS = (
    "demo",
    "generate",
    "bench",
    "eval",
    "report",
    "inspect",
    "export",
    "probe",
    "regenerate",
    "extract",
    "train",
    "export_neuron",
)


def build_app() -> Any:
    """Make the typer app.

    Raises:
        ImportError: typer or rich isn't installed.
    """
    import typer

    from .errors import ErrorLineGroup, root_options

    app = typer.Typer(
        cls=ErrorLineGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(root_options)
    for name in _COMMANDS:
        function = getattr(importlib.import_module(f".{name}", __name__), name)
        app.command(name.replace("_", "-"), **getattr(function, "typer_settings", {}))(function)
    return app


def main() -> None:
    """Entry point of the `eagle3-hf` script."""
    try:
        app = build_app()
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich"}:
            raise
        sys.stderr.write(f"error: the command line needs {error.name}: pip install 'eagle3-hf[demo]'\n")
        raise SystemExit(2) from None
    app(prog_name="eagle3-hf")
