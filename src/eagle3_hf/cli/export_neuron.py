"""`eagle3-hf export-neuron`: the same parser as `optimum-cli export eagle3-neuron`, without optimum."""

from __future__ import annotations

import typer
from rich.console import Console


def export_neuron(context: typer.Context) -> None:
    """Export a target and draft pair to static-shape graphs for AWS Neuron."""
    from ..neuron.command import DESCRIPTION, OneLineParser, add_arguments, report, run

    parser = OneLineParser(prog="eagle3-hf export-neuron", description=DESCRIPTION)
    add_arguments(parser)
    args = parser.parse_args(context.args)

    from .common import quiet_libraries

    quiet_libraries()
    Console(soft_wrap=True, highlight=False).print(report(run(args)), markup=False)


# argparse reads the arguments, --help included.
export_neuron.typer_settings = {  # type: ignore[attr-defined]
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "add_help_option": False,
}
