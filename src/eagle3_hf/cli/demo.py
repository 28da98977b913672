"""`eagle3-hf demo`: watch speculation work, and what it gains."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .measure import first_difference
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

_PROMPT = "Explain in a few sentences why the sky is blue, and why sunsets are red."
_WARM_UP_TOKENS = 4


@dataclass
class _Run:
    name: str
    ids: list[int]
    seconds: float

    @property
    def speed(self) -> float:
        return len(self.ids) / self.seconds


def _timed(
    name: str, model: Any, inputs: dict[str, Any], options: dict[str, Any], seed: int, on_block: Callable
) -> _Run:
    import torch

    from .. import SpeculationStreamer

    # Weights are packed and buffers made in a first call; a user who generates twice doesn't pay that again.
    model.generate(**inputs, **{**options, "max_new_tokens": _WARM_UP_TOKENS})
    torch.manual_seed(seed)
    start = time.perf_counter()
    out = model.generate(**inputs, **options, streamer=SpeculationStreamer(on_block))
    seconds = time.perf_counter() - start
    return _Run(name, out[0, inputs["input_ids"].shape[1] :].tolist(), seconds)


def _table(speculative: _Run, baselines: list[_Run]) -> Table:
    table = Table()
    for heading in ("generate", "tokens", "seconds", "tokens/s", "EAGLE-3 is"):
        table.add_column(heading, justify="left" if heading == "generate" else "right")
    for run in (*reversed(baselines), speculative):
        ratio = "" if run is speculative else f"{speculative.speed / run.speed:.2f} x as fast"
        table.add_row(run.name, str(len(run.ids)), f"{run.seconds:.2f}", f"{run.speed:.1f}", ratio)
    return table


def _compare(plain: list[int], speculative: list[int]) -> tuple[str, str]:
    parted = first_difference(plain, speculative)
    if parted is None:
        return f"identical: all {len(plain)} tokens are those of plain generate", "green"
    text = f"not identical: the sequences part after {parted} tokens"
    return f"{text} (rounding can turn a near-tie of two tokens, most of all below float32)", "yellow"


def demo(
    target: TargetOption = "smollm2",
    draft: DraftOption = None,
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")] = _PROMPT,
    max_new_tokens: NewTokensOption = 128,
    draft_tokens: DraftTokensOption = None,
    tree: TreeOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Stream an answer with the drafted tokens in colour, then compare its speed with plain generate."""
    drafting = drafting_options(draft_tokens, tree)
    options = {**sampling_options(temperature), "max_new_tokens": max_new_tokens}

    from .. import disable_eagle3
    from ..packing import PackedLinear
    from .common import encode, load, thread_count
    from .text import TextStream, coloured_block, stats_text

    console = Console(highlight=False)
    with thread_count(threads):
        with console.status("loading (the first time, SmolLM2 is fetched and converted) ..."):
            loaded = load(target, draft, device, dtype)
        model, tokenizer = loaded.target, loaded.tokenizer
        inputs = encode(tokenizer, prompt, model.device)
        console.print(f"target {loaded.target_path}\ndraft  {loaded.draft_path}", style="dim", markup=False)
        console.print(prompt, style="bold", markup=False)
        console.print("[bold green]coloured[/]: drafted and accepted; the rest: chosen by the target itself\n")

        stream = TextStream(tokenizer)
        speculative_options = {**options, **drafting, "assistant_model": loaded.draft}
        speculative = _timed("EAGLE-3", model, inputs, speculative_options, seed, coloured_block(console, stream))
        stats = model.speculation_stats
        console.out(stream.finish() + "\n", highlight=False)

        # No spinner here: its thread would take time from the baselines on a small machine.
        console.print("the same with plain generate ...", style="dim")
        baselines = []

        def baseline(name: str) -> None:
            silent = TextStream(tokenizer)  # decoding for a screen is part of every run, else the comparison isn't fair
            baselines.append(_timed(name, model, inputs, options, seed, lambda ids, _: silent.push(ids)))

        if any(isinstance(module, PackedLinear) for module in model.modules()):
            baseline("plain, packed weights")
        disable_eagle3(model)
        baseline("plain")
    console.print(_table(speculative, baselines))
    console.print(stats_text(stats), markup=False)
    if temperature == 0:
        message, style = _compare(baselines[-1].ids, speculative.ids)
        console.print(message, style=style)
