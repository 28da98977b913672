"""`eagle3-hf report`: a results file of `eval` as a page, as markdown or as JSON."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


class Format(str, Enum):
    """How to write a report."""

    html = "html"
    markdown = "markdown"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="`html` is one page that opens offline.")]
ReportOption = Annotated[
    Path | None,
    typer.Option("--report", help="File for the report. Default: beside the results for html, else standard output."),
]
_SUFFIX = {Format.html: ".html", Format.markdown: ".md", Format.json: ".json"}


def check_report(kind: Format, path: Path | None) -> None:
    """Say what is missing for a report before hours of measuring, not after.

    Raises:
        ValueError: no such folder, or no jinja2.
    """
    if path is not None and not path.expanduser().resolve().parent.is_dir():
        raise ValueError(f"--report: no folder {path.parent}")
    if kind is Format.html:
        try:
            import jinja2  # noqa: F401
        except ImportError:
            raise ValueError("an html report needs jinja2: pip install 'eagle3-hf[eval]'") from None


def write_report(results_file: Path, kind: Format, path: Path | None) -> None:
    """Make the report of a results file and write or print it."""
    from ..evaluation.report import render
    from ..evaluation.results import read_results

    text = render(read_results(results_file), kind.value)
    if path is None and kind is Format.html:
        path = results_file.with_suffix(_SUFFIX[kind])
    if path is None:
        Console(soft_wrap=True).out(text, highlight=False)
    else:
        path.expanduser().write_text(text, encoding="utf-8")
        Console(highlight=False, soft_wrap=True).print(f"wrote {path}", markup=False)


def report(
    results: Annotated[Path, typer.Argument(help="Results file that `eagle3-hf eval` has written.")],
    kind: FormatOption = Format.html,
    path: ReportOption = None,
) -> None:
    """Show the results of `eagle3-hf eval` again; needs no model."""
    check_report(kind, path)
    write_report(results.expanduser(), kind, path)
