"""What the commands that read training data share."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .progress import ProgressLines

DataOption = Annotated[
    list[str],
    typer.Option(
        "--data",
        help="A .jsonl, .json, .csv or .parquet file, a folder of them, or a Hub id OWNER/NAME[:CONFIG][@SPLIT]. "
        "Messages, ShareGPT and prompt/response forms are recognised. May be repeated.",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="FIELD=NAME", help="Column for messages, or prompt, response and system. Repeatable."
    ),
]
StreamingOption = Annotated[bool, typer.Option("--streaming", help="Read the data as it comes, without a cache.")]
ShuffleOption = Annotated[int | None, typer.Option("--shuffle", metavar="SEED", help="Shuffle the data first.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Most conversations of each source.")]
SkipBadOption = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out bad rows, and say how many, instead of stopping at the first.")
]
TemplateOption = Annotated[
    str,
    typer.Option(
        "--template", metavar="JSON", help="""More variables for the chat template, as '{"enable_thinking": false}'."""
    ),
]


def parse_json(option: str, text: str) -> dict[str, Any]:
    """A JSON object given on the command line."""
    try:
        made = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{option} isn't JSON: {error}") from None
    if not isinstance(made, dict):
        raise ValueError(f"{option} must be a JSON object; got {text!r}")
    return made


def template_options(text: str) -> dict[str, Any]:
    """The value of `--template`."""
    return parse_json("--template", text)


def show_log() -> None:
    """Show the package's log on stderr for this process."""
    logger = logging.getLogger("eagle3_hf")
    if not any(isinstance(handler, RichHandler) for handler in logger.handlers):
        handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False, markup=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _quiet_datasets()


def _quiet_datasets() -> None:
    try:
        import datasets
    except ImportError:  # the reader of the data says so with an error of its own
        return
    datasets.disable_progress_bars()


@contextmanager
def progress_bar(what: str, total: int | None, done: int, unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with elapsed and remaining time; call what it yields with items done and units made so far."""
    console = Console(stderr=True)
    lines = ProgressLines(console, done)
    bar = Progress(
        TextColumn(f"{what} {{task.fields[rate]}}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # The rate of answers changes slowly: short ones come first.
        speed_estimate_period=300,
    )
    with bar:
        task = bar.add_task(what, total=total, completed=done, rate="")
        start = time.monotonic()

        def show(completed: int, units: int) -> None:
            rate = units / max(time.monotonic() - start, 1e-3)
            bar.update(task, completed=completed, rate=f"{rate:.0f} {unit}/s")
            lines(completed, total, f"{what} {rate:.0f} {unit}/s")

        yield show
