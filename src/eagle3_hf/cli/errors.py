"""The top of the command line: wrong input becomes one line, not a traceback."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

_USER_ERRORS = (ValueError, OSError, ImportError, KeyError, RuntimeError)


class ErrorLineGroup(TyperGroup):
    """Command group that reports wrong input as one line on stderr and exits with 2."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        with _errors_in_a_line(show=not args):  # without arguments, click raises what prints the help
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _errors_in_a_line(show=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextmanager
def _errors_in_a_line(show: bool) -> Iterator[None]:
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        text = _one_line(error)
        if show or text is None:
            raise
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print("error:", style="bold red", end=" ")
        console.print(text, style="red", markup=False)
        raise typer.Exit(2) from None


def _one_line(error: Exception) -> str | None:
    """The error as one line, or `None` for one that isn't the user's to mend."""
    # click's own errors by duck typing: newer typer carries its private copy of click.
    usage = getattr(error, "format_message", None)
    if usage is not None:
        command = getattr(getattr(error, "ctx", None), "command_path", "")
        hint = f" (see {command} --help)" if command else ""
        return " ".join(str(usage()).split()) + hint
    if isinstance(error, BrokenPipeError) or getattr(error, "errno", None) == errno.EPIPE:
        return None
    from_safetensors = type(error).__module__.startswith("safetensors")
    if not isinstance(error, _USER_ERRORS) and not from_safetensors:
        return None
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def _show_version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        Console(highlight=False).print(__version__)
        raise typer.Exit()


def root_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """EAGLE-3 speculative decoding for Hugging Face transformers: the same output, fewer target forwards."""
