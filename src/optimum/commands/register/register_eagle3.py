"""Makes `optimum-cli export eagle3-neuron` known to optimum.

optimum looks into the namespace folder `optimum/commands/register/`. There must be no `__init__.py` in it or above it
in this package, and nothing of `optimum.exporters` may be imported here.
"""

from __future__ import annotations

import logging
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand
from safetensors import SafetensorError

from eagle3_hf.neuron.command import DESCRIPTION, add_arguments, report, run


class Eagle3NeuronExportCommand(BaseOptimumCLICommand):
    """`optimum-cli export eagle3-neuron`."""

    COMMAND = CommandInfo(name="eagle3-neuron", help=DESCRIPTION)

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        """Add our options to optimum's parser."""
        add_arguments(parser)

    def run(self) -> None:
        """Export."""
        try:
            result = run(self.args)
        except (ValueError, OSError, ImportError, RuntimeError, SafetensorError) as error:
            raise SystemExit(f"error: {' '.join(str(error).split())}") from None
        logging.basicConfig()
        logger = logging.getLogger("eagle3_hf.neuron")
        logger.setLevel(logging.INFO)
        logger.info(report(result))


REGISTER_COMMANDS = [(Eagle3NeuronExportCommand, ExportCommand)]
