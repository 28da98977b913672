"""`eagle3-hf bench`: speculation against plain generate on a file of prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    NewTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    drafting_options,
    sampling_options,
)

if TYPE_CHECKING:
    from .measure import Method


def _default_prompts() -> Path:
    from .common import project_root

    root = project_root()
    if root is None:
        raise ValueError("no prompts: pass --prompts FILE (JSON Lines with `turns` or `prompt`)")
    return root.parent / "shared" / "data" / "prompts" / "mt_bench.jsonl"


def _methods(draft_tokens: list[int], trees: list[str], packed: bool) -> list[Method]:
    from .measure import PACKED, PLAIN, Method

    methods = [Method(PLAIN, "plain")]
    if packed:
        methods.append(Method(PACKED, "packed"))
    if not draft_tokens and not trees:
        methods.append(Method("EAGLE-3", "eagle3", {}))
    methods += [Method(f"K={k}", "eagle3", drafting_options(k)) for k in dict.fromkeys(draft_tokens)]
    methods += [Method(f"tree {tree}", "eagle3", drafting_options(None, tree)) for tree in dict.fromkeys(trees)]
    return methods


def _ratio(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['median']:.2f}/{value['total']:.2f}"


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _speed_table(summary: dict[str, dict[str, Any]]) -> Table:
    table = _table("tokens/s", "to plain", "to packed", "tau", "kept", "eff.", "same")
    for name, entry in summary.items():
        counts = entry.get("speculation")
        same = entry["identical_to_plain"]
        table.add_row(
            name,
            f"{entry['tokens_per_second_median']:.1f}",
            _ratio(entry["ratio_to_plain"]),
            _ratio(entry["ratio_to_packed"]),
            f"{counts['tau']:.2f}" if counts else "-",
            f"{counts['acceptance_rate']:.0%}" if counts else "-",
            f"{counts['cycle_efficiency']:.2f}" if counts else "-",
            "-" if same is None else f"{same:.0%}",
        )
    return table


def _acceptance_table(summary: dict[str, dict[str, Any]]) -> Table:
    counts = {name: entry["speculation"] for name, entry in summary.items() if "speculation" in entry}
    depth = max(len(entry["conditional_acceptance"]) for entry in counts.values())
    table = _table(*(str(position) for position in range(1, depth + 1)))
    for name, entry in counts.items():
        pairs = zip(entry["conditional_acceptance"], entry["unconditional_acceptance"])
        table.add_row(name, *(f"{given:.2f}/{of_all:.2f}" for given, of_all in pairs))
    return table


def _profile_table(summary: dict[str, dict[str, Any]]) -> Table:
    parts = ("target", "draft", "rest", "total")
    table = _table(*parts)
    for name, entry in summary.items():
        spent = entry.get("milliseconds_per_round") or {"total": 1000 * entry["seconds"] / entry["tokens"]}
        table.add_row(name, *(f"{spent[part]:.1f}" if part in spent else "-" for part in parts))
    return table


def bench(
    target: TargetOption = "smollm2",
    draft: DraftOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON Lines with `turns` or `prompt`. Default: MT-bench beside the checkout."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Use the first so many prompts.")] = 20,
    max_new_tokens: NewTokensOption = 128,
    draft_tokens: Annotated[
        list[int] | None,
        typer.Option("--num-assistant-tokens", "-K", min=1, help="Chain of K drafted tokens. May be repeated."),
    ] = None,
    trees: Annotated[
        list[str] | None,
        typer.Option("--tree", metavar="K:TOPK:TOTAL", help="Tree: depth, children a node, nodes. May be repeated."),
    ] = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs for each prompt and method.")] = 1,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Prompts run first, unmeasured.")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all measurements to this file.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Show where a round's time went.")] = False,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compare speculation with plain generate, pairwise and alternating, in one process.

    `plain` is transformers' own generate on the untouched model.

    `plain, packed` (CPU, float32) is the same on the packed weights that speculation uses.
    """
    for tree in trees or []:
        drafting_options(None, tree)
    if json_file is not None and not json_file.expanduser().resolve().parent.is_dir():
        raise ValueError(f"--json: no folder {json_file.parent}")

    from .measure import read_prompts

    prompt_file = prompts or _default_prompts()
    records = read_prompts(prompt_file, limit)

    from transformers import AutoModelForCausalLM

    from ..packing import PackedLinear
    from .common import encode, load, pick_dtype, thread_count
    from .measure import Bench, environment, prompt_records, summarise

    out, err = Console(highlight=False), Console(stderr=True)
    with thread_count(threads):
        loaded = load(target, draft, device, dtype)
        # A second instance: nothing that speculation changes may reach the baseline.
        untouched = AutoModelForCausalLM.from_pretrained(loaded.target_path, dtype=pick_dtype(dtype)).to(device).eval()
        packed = any(isinstance(module, PackedLinear) for module in loaded.target.modules())
        methods = _methods(draft_tokens or [], trees or [], packed)
        inputs = [encode(loaded.tokenizer, record["text"], device) for record in records]
        options = {**sampling_options(temperature), "max_new_tokens": max_new_tokens}
        run = Bench(untouched, loaded.target, loaded.draft, methods, options, seed, repeats)
        machine = environment(device)
        # No auto-refresh: its thread would take time from what is measured.
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, auto_refresh=False, transient=True) as progress:
            task = progress.add_task("warm-up", total=len(inputs) * len(methods) * repeats)
            progress.refresh()
            run.warm_up(inputs[:warmup])
            progress.update(task, description="measuring", refresh=True)
            results = run.measure(inputs, on_run=lambda: progress.update(task, advance=1, refresh=True))

    summary = summarise(methods, results, greedy=temperature == 0)
    mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    out.print(f"{len(records)} prompts, {max_new_tokens} new tokens, {mode}, {dtype}, {machine['threads']} threads")
    out.print("to plain, to packed: median of the paired speed ratios / ratio of the totals;")
    out.print("kept: accepted of drafted; eff.: cycle efficiency; same: prompts as in plain")
    out.print(_speed_table(summary))
    out.print("acceptance by position: given all earlier ones / of all rounds", _acceptance_table(summary), sep="\n")
    if profile:
        heading = "milliseconds a round without the prefill (plain: a token, with it)"
        out.print(heading, _profile_table(summary), sep="\n")
    if json_file is not None:
        settings = {
            "target": target,
            "target_path": loaded.target_path,
            "draft_path": loaded.draft_path,
            "prompts": str(prompt_file),
            "limit": limit,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "repeats": repeats,
            "warmup": warmup,
            "dtype": dtype,
        }
        lengths = [made["input_ids"].shape[1] for made in inputs]
        report = {
            "environment": machine,
            "settings": settings,
            "methods": summary,
            "prompts": prompt_records(records, lengths, results, greedy=temperature == 0),
        }
        json_file.expanduser().write_text(json.dumps(report, indent=2) + "\n")
        out.print(f"wrote {json_file}", markup=False)
