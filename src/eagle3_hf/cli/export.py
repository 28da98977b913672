"""`eagle3-hf export`: write a draft in another published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .inspect import RevisionOption, SubfolderOption, hub_options, warnings_shown_here


def export(
    draft: Annotated[str, typer.Argument(help="Draft folder or Hub id, of any layout.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; must hold no checkpoint.")],
    format: Annotated[
        str, typer.Option("--format", "-f", help="`speculators`, `specforge`, `eagle` or `transformers`.")
    ],
    draft_tokens: Annotated[
        int | None, typer.Option("--num-assistant-tokens", "-K", min=1, help="Tokens drafted a round, for the servers.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="Its target, for drafts without a head; its depth settles the aux ids, too."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="`auto` keeps the file's; or float32, bfloat16, float16.")
    ] = "auto",
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
) -> None:
    """Write a draft so that vLLM, SGLang or EAGLE's own code load it, and show the line that starts them."""
    from .. import AutoEagle3Target, Eagle3DraftModel, resolve_model
    from ..checkpoints import export_draft
    from .common import check_model_name, pick_dtype, quiet_libraries

    quiet_libraries()
    kind = dtype if dtype == "auto" else pick_dtype(dtype)
    model = None
    if target is not None:
        model = AutoEagle3Target.from_pretrained(resolve_model(check_model_name("target", target)), pack=False)
    name = draft if subfolder else check_model_name("draft", draft)
    with warnings_shown_here():
        loaded = Eagle3DraftModel.from_pretrained(name, target=model, dtype=kind, **hub_options(revision, subfolder))
        done = export_draft(loaded, folder, format, draft_tokens)
    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    for text in [*loaded.provenance.warnings, *done.warnings]:
        err.print("warning: " + text, style="yellow", markup=False)
    out.print(f"{loaded.provenance.family} -> {format}: {done.folder} ({', '.join(done.files)})", markup=False)
    for tool, line in done.serving.items():
        out.print(f"{tool}:\n  {line}", markup=False)
