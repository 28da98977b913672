"""`eagle3-hf inspect`: what a draft checkpoint is, and what loading it does to it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN = (
    "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "target_num_hidden_layers",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "use_aux_hidden_state", "num_aux_hidden_states", "own_embeddings",
    "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "final_norm", "qk_norm", "attention_bias",
    "mlp_bias", "fc_bias", "sliding_window",
)  # fmt: skip

RevisionOption = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the Hub.")]
SubfolderOption = Annotated[str | None, typer.Option("--subfolder", help="Folder inside the checkpoint.")]


def hub_options(revision: str | None, subfolder: str | None) -> dict[str, str]:
    """Keywords for `from_pretrained`; only those that were given."""
    given = {"revision": revision, "subfolder": subfolder}
    return {name: value for name, value in given.items() if value is not None}


@contextmanager
def warnings_shown_here() -> Iterator[None]:
    """Keep the package's own warnings off the log: the command prints them itself."""
    logger = logging.getLogger("eagle3_hf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def inspect(
    path: Annotated[str, typer.Argument(help="Draft folder or Hub id.")],
    target: Annotated[
        str | None, typer.Option("--target", help="Its target, for drafts that need it (no head of their own).")
    ] = None,
    revision: RevisionOption = None,
    subfolder: SubfolderOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the record to this file too.")] = None,
) -> None:
    """Load a draft of any published layout and show how it was read."""
    from .. import AutoEagle3Target, Eagle3DraftModel, resolve_model
    from .common import check_model_name, quiet_libraries

    quiet_libraries()
    model = None
    if target is not None:
        model = AutoEagle3Target.from_pretrained(resolve_model(check_model_name("target", target)), pack=False)
    name = path if subfolder else check_model_name("draft", path)
    with warnings_shown_here():
        draft = Eagle3DraftModel.from_pretrained(name, target=model, dtype="auto", **hub_options(revision, subfolder))
    console = Console(highlight=False)
    record = draft.provenance
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    last = None
    for label, value in record.rows():
        # Text, not markup: brackets of a list would be taken for a style.
        table.add_row("" if label == last else label, Text(value), style="yellow" if label == "warning" else None)
        last = label
    table.add_section()
    count = sum(parameter.numel() for parameter in draft.parameters())
    table.add_row("weights", f"{count:,} in {str(draft.dtype).removeprefix('torch.')}")
    values = {field: getattr(draft.config, field) for field in _SHOWN}
    for field, value in values.items():
        table.add_row(field, Text(str(value)))
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"provenance": record.as_dict(), "config": values}, indent=2) + "\n")
