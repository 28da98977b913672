"""`eagle3-hf train`: train a draft by a recipe."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint in training.output_dir.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the recipe: three updates of a shrunk random model of the family."),
    ] = False,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Another value for a key of the recipe; repeatable."),
    ] = None,
) -> None:
    """Train a draft: data, features, objective and trainer as the recipe says."""
    from ..training.recipe import load_recipe
    from .training_options import show_log

    loaded = load_recipe(recipe, values or ())
    # Under torchrun or accelerate launch, one process speaks for all.
    leads = os.environ.get("RANK", "0") == "0"
    if leads:
        show_log()
    console = Console(highlight=False, soft_wrap=True)
    if dry_run:
        from ..training.dry_run import dry_run as try_out
        from .common import quiet_libraries

        quiet_libraries()
        with tempfile.TemporaryDirectory() as folder:
            facts = try_out(loaded, Path(folder) / "run")
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in facts.items():
            table.add_row(Text(name, style="bold"), Text(str(value)))
        console.print(table)
        return
    from ..training.run import FailedElsewhereError, run
    from ..training.sources import open_data

    try:
        result = run(loaded, open_data(loaded), resume)
    except FailedElsewhereError:
        raise typer.Exit(2) from None  # the first process says why, once
    if not leads:
        raise typer.Exit(0 if result.finished else 128 + (result.signal or 15))
    if not result.finished:
        console.print(
            f"stopped at update {result.updates} of {result.numbers['planned_updates']}; --resume goes on", markup=False
        )
        raise typer.Exit(128 + (result.signal or 15))
    console.print(f"{result.updates} updates done; the draft is in {result.folder}", markup=False)
