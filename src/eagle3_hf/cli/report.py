"""`eagle3-hf report`: a results file of `eval` as a page, as markdown or as JSON."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..files import write_whole


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


def _report_path(results_file: Path, kind: Format, path: Path | None) -> Path | None:
    """Where the report goes; `None` for standard output."""
    if path is not None:
        return path.expanduser()
    return results_file.with_suffix(_SUFFIX[kind]) if kind is Format.html else None


def check_report(results_file: Path, kind: Format, path: Path | None) -> None:
    """Say what is missing for a report before hours of measuring, not after.

    Raises:
        ValueError: no such folder, a folder where the file should be, the results file itself, or no jinja2.
    """
    place = _report_path(results_file, kind, path)
    if place is not None:
        if not place.resolve().parent.is_dir():
            raise ValueError(f"--report: no folder {place.parent}")
        if place.is_dir():
            raise ValueError(f"--report: {place} is a folder, not a file")
        if place.resolve() == results_file.resolve():
            raise ValueError(f"the report would overwrite the results in {results_file}: pass another --report")
    if kind is Format.html:
        try:
            import jinja2  # noqa: F401
        except ImportError:
            raise ValueError("an html report needs jinja2: pip install 'eagle3-hf[eval]'") from None


def _write(path: Path, text: str) -> None:
    """A full disk leaves the report of an earlier run as it was."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # a pipe or a terminal
        return
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}; the report isn't written, the results are kept") from error


def write_report(results_file: Path, kind: Format, path: Path | None) -> None:
    """Make the report of a results file and write or print it."""
    from ..evaluation.report import render
    from ..evaluation.results import read_results

    text = render(read_results(results_file), kind.value)
    place = _report_path(results_file, kind, path)
    if place is None:
        Console(soft_wrap=True).out(text, highlight=False)
    else:
        _write(place, text)
        Console(highlight=False, soft_wrap=True).print(f"wrote {place}", markup=False)


def report(
    results: Annotated[Path, typer.Argument(help="Results file that `eagle3-hf eval` has written.")],
    kind: FormatOption = Format.html,
    path: ReportOption = None,
) -> None:
    """Show the results of `eagle3-hf eval` again; needs no model."""
    results = results.expanduser()
    check_report(results, kind, path)
    write_report(results, kind, path)
