"""`eagle3-hf probe`: does the draft fit, and is it read right? Tried out on the target's own text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .options import DeviceOption, DraftOption, DtypeOption, TargetOption, ThreadsOption

_PROMPTS = (
    "Explain why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips for sleeping better.",
    "Summarise how a bill becomes a law.",
    "Write a Python function that reverses a string.",
    "What should I see in Rome in one day?",
    "A train covers 120 km in 90 minutes. How fast is it?",
    "Describe the water cycle to a child.",
    "Write a polite e-mail that moves a meeting to Friday.",
    "Which foods contain a lot of iron?",
    "Compare cats and dogs as pets.",
    "How do vaccines work?",
    "Write a short poem about the sea.",
    "List the planets of the solar system with one fact each.",
    "What does a compiler do?",
    "Plan a simple dinner for four people.",
    "Translate into French: Where is the railway station?",
    "Why did the Roman Empire fall?",
    "Write an SQL query that counts the orders of each customer.",
    "If 3 apples cost 2 euros, what do 12 apples cost?",
    "Give advice to somebody who starts a new job.",
    "Explain the difference between weather and climate.",
    "Tell me a story that begins with a lost key.",
)


def probe(
    target: TargetOption = "smollm2",
    draft: DraftOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON Lines with `turns` or `prompt`, instead of the built-in ones."),
    ] = None,
    count: Annotated[
        int, typer.Option("--num-prompts", min=1, help="How many of them at most; half of them if that is enough.")
    ] = len(_PROMPTS),
    new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=4, help="Tokens of each continuation.")] = 64,
    raw: Annotated[bool, typer.Option("--raw", help="Don't put the prompts into the chat template.")] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.")] = None,
) -> None:
    """Measure how well the draft predicts as loaded, with other aux ids and norms, and say which reading is right."""
    from ..checkpoints.probe import probe_draft
    from .common import encode, load, thread_count
    from .measure import read_prompts

    texts = list(_PROMPTS[:count]) if prompts is None else [item["text"] for item in read_prompts(prompts, count)]
    with thread_count(threads):
        loaded = load(target, draft, device, dtype)
        assert loaded.draft is not None
        ids = [encode(loaded.tokenizer, text, loaded.target.device, raw)["input_ids"] for text in texts]
        verdict = probe_draft(loaded.target, loaded.draft, ids, new_tokens, enough=(len(ids) + 1) // 2)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a log has no edge to keep within
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("reading", "aux ids", "1st token", "2nd token", "log-prob.", "places"):
        table.add_column(name, no_wrap=True, justify="left" if name in {"reading", "aux ids"} else "right")
    for reading in verdict.readings:
        best = "bold green" if reading.name == verdict.best else None
        ids_text = " ".join(map(str, reading.ids))
        table.add_row(
            reading.name,
            ids_text,
            f"{reading.first:.3f}",
            f"{reading.second:.3f}",
            f"{reading.log_prob:.3f}",
            str(reading.places),
            style=best,
        )
    console.print(table)
    console.print(verdict.text, markup=False)
    if json_file is not None:
        record = asdict(verdict)
        for entry in record["readings"]:
            del entry["log_probs"], entry["second_log_probs"]  # hundreds of numbers
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if not verdict.as_loaded_is_right:
        raise typer.Exit(1)
