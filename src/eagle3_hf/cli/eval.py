"""`eagle3-hf eval`: methods side by side on datasets, into a results file and a report."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .options import (
    DeviceOption,
    DraftOption,
    DtypeOption,
    NewTokensOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    sampling_options,
)
from .progress import ProgressLines
from .report import Format, FormatOption, ReportOption, check_report, write_report

if TYPE_CHECKING:
    from ..evaluation.methods import Method, Models
    from ..evaluation.prompts import Prompt

_DATASETS = ("mt_bench", "gsm8k", "humaneval", "alpaca")


def _data_dir(given: Path | None) -> Path | None:
    from .common import project_root

    root = project_root()
    return given or (root.parent / "shared" / "data" / "prompts" if root else None)


def _default_methods(with_assistant: bool, packed: bool) -> list[str]:
    middle = ["assisted"] if with_assistant else []
    return ["plain", *(["packed"] if packed else []), "prompt-lookup", *middle, "chain", "static", "tree"]


def _load_datasets(
    specs: list[str], data_dir: Path | None, columns: list[str], limit: int | None
) -> dict[str, list[Prompt]]:
    from ..evaluation.prompts import NAMED, load_prompts, parse_columns, pick

    mapping, found = parse_columns(columns), {}
    if mapping and all(spec.replace("-", "_") in NAMED for spec in specs):
        raise ValueError(f"--column is for files and Hub sets; {', '.join(specs)} has columns of its own")
    for spec in dict.fromkeys(specs):
        prompts = pick(load_prompts(spec, data_dir, mapping), limit)
        name = prompts[0].dataset
        if name in found:
            raise ValueError(f"two datasets are called {name!r}: rename one of the files")
        found[name] = prompts
    return found


def _load_assistant(path: str, target: Any, device: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    from .common import check_model_name, pick_dtype

    small = AutoModelForCausalLM.from_pretrained(check_model_name("assistant", path), dtype=pick_dtype(dtype))
    sizes = [model.config.get_text_config().vocab_size for model in (small, target)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the assistant {path} has a vocabulary of {sizes[0]} tokens, the target one of {sizes[1]}")
    return small.to(device).eval()


def _load_models(
    target: str, draft: str | None, assistant: str | None, device: str, dtype: str, with_draft: bool
) -> tuple[Models, Any]:
    from transformers import AutoModelForCausalLM

    from ..evaluation.methods import Models
    from ..packing import PackedLinear
    from .common import load, pick_dtype

    loaded = load(target, draft, device, dtype, with_draft=with_draft)
    # A second instance: nothing that speculation changes may reach the baseline.
    plain = AutoModelForCausalLM.from_pretrained(loaded.target_path, dtype=pick_dtype(dtype)).to(device).eval()
    small = None if assistant is None else _load_assistant(assistant, plain, device, dtype)
    packed = any(isinstance(module, PackedLinear) for module in loaded.target.modules())
    return Models(plain, loaded.target, loaded.draft, small, packed), loaded


def _make_methods(given: list[str] | None, models: Models, batch_sizes: list[int]) -> list[Method]:
    """The methods asked for, or of the usual ones those that run at one of the batch sizes."""
    from ..evaluation.methods import make_methods

    if given is None:
        made = make_methods(_default_methods(models.assistant is not None, models.packed), models)
        return [m for m in made if m.max_batch is None or min(batch_sizes) <= m.max_batch]
    made = make_methods(given, models)
    if models.assistant is not None and not any(m.options.get("assistant_model") is models.assistant for m in made):
        raise ValueError("--assistant is for the method `assisted`, which isn't among those given")
    return made


def _checksum(draft_path: str | None) -> str | None:
    """Of the draft's files, where they lie in a folder: after more training another draft is at the same place."""
    if draft_path is None or not Path(draft_path).is_dir():
        return None
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(Path(draft_path).iterdir()):
        if file.suffix in {".json", ".safetensors", ".bin"} and file.is_file():
            digest.update(file.name.encode())
            with file.open("rb") as content:
                while part := content.read(1 << 22):
                    digest.update(part)
    return digest.hexdigest()


def eval(
    target: TargetOption = "smollm2",
    draft: DraftOption = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            "--dataset",
            help="`mt_bench`, `gsm8k`, `humaneval`, `alpaca`, `spec_bench`, a .jsonl, .json, .csv or .parquet file, or "
            "a Hub id OWNER/NAME[:CONFIG][@SPLIT]. May be repeated. Default: the first four.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder of the named sets. Default: the one beside the checkout.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option("--column", metavar="FIELD=NAME", help="Column for turns, prompt, category or id. Repeatable."),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option("--method", help="A way to generate, see --list-methods. May be repeated; plain always runs."),
    ] = None,
    list_methods: Annotated[bool, typer.Option("--list-methods", help="List the methods and stop.")] = False,
    plugin: Annotated[
        list[Path] | None, typer.Option("--plugin", help="Python file that registers methods. May be repeated.")
    ] = None,
    assistant: Annotated[
        str | None, typer.Option("--assistant", help="Small language model for `assisted`, a folder or a Hub id.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Prompts of each set, over its categories.")] = 20,
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="Most turns of a conversation.")] = None,
    max_new_tokens: NewTokensOption = 128,
    temperature: TemperatureOption = 0.0,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", min=1, help="Prompts a call. May be repeated. Default: 1.")
    ] = None,
    seed: SeedOption = 0,
    out: Annotated[
        Path, typer.Option("--out", help="Results file. Where it is there, only what it lacks is run.")
    ] = Path("eval.jsonl"),
    kind: FormatOption = Format.html,
    path: ReportOption = None,
    traces: Annotated[int, typer.Option("--traces", min=0, help="Prompts of each set shown token by token.")] = 3,
    threads: ThreadsOption = None,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Measure methods of generation side by side on datasets; results are kept as they come.

    A run that was broken off goes on where it stopped when the same command is given again.
    """
    from ..evaluation.methods import check_specs, descriptions, load_plugin, uses_draft

    for file in plugin or []:
        load_plugin(file)
    if list_methods:
        Console(soft_wrap=True, highlight=False).print("\n".join(descriptions()), markup=False)
        return
    check_specs(method or [])
    out = out.expanduser()
    if not out.resolve().parent.is_dir():
        raise ValueError(f"--out: no folder {out.parent}")
    check_report(out, kind, path)
    chosen = _load_datasets(list(dataset or _DATASETS), _data_dir(data_dir), column or [], limit)

    from ..evaluation.harness import Harness, Task
    from ..evaluation.results import ResultsWriter
    from .common import thread_count
    from .measure import environment

    with thread_count(threads):
        with_draft = method is None or any(map(uses_draft, method))
        models, loaded = _load_models(target, draft, assistant, device, dtype, with_draft)
        sizes = list(dict.fromkeys(batch_size or [1]))
        methods = _make_methods(method, models, sizes)
        machine = environment(device)
        options = {**sampling_options(temperature), "max_new_tokens": max_new_tokens}
        settings = {
            "target": loaded.target_path,
            "draft": loaded.draft_path,
            "draft_files": _checksum(loaded.draft_path),
            "assistant": assistant,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "dtype": dtype,
            "device": device,
            "threads": machine["threads"],
            "chat_template": bool(getattr(loaded.tokenizer, "chat_template", None)),
        }
        task = Task(options, sizes, turns, seed, traces)
        longest = getattr(models.plain.config.get_text_config(), "max_position_embeddings", None)
        with ResultsWriter(out, settings) as writer:
            harness = Harness(methods, loaded.tokenizer, chosen, writer, task, longest)
            harness.check_lengths()
            writer.add_session({"environment": machine, "methods": [m.facts(models) for m in methods]})
            _run(harness)
    write_report(out, kind, path)


def _run(harness: Any) -> None:
    """Run with a bar on standard error: calls done, time left, acceptance so far."""
    counts: dict[str, list[int]] = {}
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    lines = ProgressLines(console)
    # No auto-refresh: its thread would take time from what is measured.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        total = harness.total()
        task = progress.add_task("warm-up", total=total)
        progress.refresh()

        def on_call(record: dict[str, Any] | None) -> None:
            if record is not None and record["stats"] is not None:
                so_far = counts.setdefault(record["method"], [0, 0])
                so_far[0] += record["stats"]["generated"]
                so_far[1] += record["stats"]["rounds"]
            best = max(counts.items(), key=lambda item: item[1][0] / max(item[1][1], 1), default=None)
            tau = "" if best is None else f" tau {best[1][0] / max(best[1][1], 1):.2f} ({best[0]})"
            progress.update(task, advance=1, description=f"measuring{tau}", refresh=True)
            lines(int(progress.tasks[task].completed), total, f"measuring{tau}")

        harness.run(on_call)
