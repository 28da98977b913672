"""`eagle3-hf generate`: one answer, text only."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from .options import (
    DeviceOption,
    DraftOption,
    DraftTokensOption,
    DtypeOption,
    NewTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TreeOption,
    drafting_options,
    sampling_options,
)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt: give it as an argument or on standard input")
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError("no prompt: standard input is empty")
    return text


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Without it, or as `-`: standard input.")] = None,
    target: TargetOption = "smollm2",
    draft: DraftOption = None,
    max_new_tokens: NewTokensOption = 256,
    draft_tokens: DraftTokensOption = None,
    tree: TreeOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Sampling: keep the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option("--top-p", min=0.0, max=1.0, help="Sampling: keep this much probability.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="As in transformers; 1 is none.")
    ] = 1.0,
    seed: SeedOption = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Don't put the prompt into the chat template.")] = False,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain generate, no speculation.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Acceptance and speed on standard error.")] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Generate an answer and print its text, nothing else."""
    text = _read_prompt(prompt)
    drafting = drafting_options(draft_tokens, tree)
    if no_draft and (drafting or draft is not None):
        raise ValueError("--no-draft doesn't go with --draft, -K or --tree")
    sampling = sampling_options(temperature, top_k, top_p)

    import time

    import torch

    from .. import SpeculationStreamer
    from .common import encode, load, thread_count
    from .text import TextStream, coloured_block, stats_text

    out = Console(soft_wrap=True)
    with thread_count(threads):
        loaded = load(target, draft, device, dtype, with_draft=not no_draft)
        inputs = encode(loaded.tokenizer, text, loaded.target.device, raw)
        stream = TextStream(loaded.tokenizer)
        if loaded.draft is not None:
            drafting["assistant_model"] = loaded.draft
        torch.manual_seed(seed)
        start = time.perf_counter()
        loaded.target.generate(
            **inputs,
            **drafting,
            **sampling,
            repetition_penalty=repetition_penalty,
            max_new_tokens=max_new_tokens,
            streamer=SpeculationStreamer(coloured_block(out, stream, drafted_style=None)),
        )
        seconds = time.perf_counter() - start
        out.out(stream.finish(), highlight=False)
    if stats:
        err = Console(stderr=True, highlight=False, soft_wrap=True)
        count = len(stream.ids)
        err.print(f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s (first call, warm-up included)")
        if loaded.draft is not None:
            err.print(stats_text(loaded.target.speculation_stats), markup=False)
