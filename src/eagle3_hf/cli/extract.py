"""`eagle3-hf extract`: store the target's states for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from .options import DeviceOption, TargetOption, ThreadsOption
from .training_options import (
    ColumnOption,
    DataOption,
    LimitOption,
    ShuffleOption,
    SkipBadOption,
    StreamingOption,
    TemplateOption,
    progress_bar,
    show_log,
    template_options,
)


def _load(target: str, dtype: str, device: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import resolve_model
    from .common import check_device, check_model_name, pick_dtype, quiet_libraries

    quiet_libraries()
    check_device(device)
    path = resolve_model(check_model_name("target", target))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=pick_dtype(dtype)).to(device).eval()
    return model, AutoTokenizer.from_pretrained(path)


def extract(
    data: DataOption,
    out: Annotated[Path, typer.Option("--out", help="Folder for the features. The same command continues in it.")],
    target: TargetOption = "smollm2",
    teacher: Annotated[
        str,
        typer.Option(
            "--teacher",
            help="`hidden`: the state before the target's head (the head is applied again in training); `topk:K` or "
            "`logits`: its distribution.",
        ),
    ] = "hidden",
    aux_layer: Annotated[
        list[int] | None,
        typer.Option("--aux-layer", help="Layer whose input the draft reads. Repeatable. Default: 2, L//2, L-3."),
    ] = None,
    store_dtype: Annotated[
        str, typer.Option("--store-dtype", help="`float16`, `bfloat16` or `float32`: of the stored states.")
    ] = "float16",
    max_length: Annotated[int, typer.Option("--max-length", min=3, help="Documents are cut to so many tokens.")] = 2048,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", min=1, help="Padded tokens a forward.")] = 1024,
    shard_documents: Annotated[int, typer.Option("--shard-documents", min=1, help="Documents a shard.")] = 512,
    column: ColumnOption = None,
    streaming: StreamingOption = False,
    shuffle: ShuffleOption = None,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    template: TemplateOption = "{}",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show a masked sample and the size, and stop.")] = False,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="`bfloat16`, `float16` or `float32`: the target computes in.")
    ] = "bfloat16",
    threads: ThreadsOption = None,
) -> None:
    """Run the target over conversations and store what a draft learns from.

    The size is printed before anything runs, and a disk that is too small is refused. After an interruption the same
    command goes on; what a killed process had not yet written as a shard is done again.
    """
    from ..training.data import parse_columns, read_conversations
    from ..training.documents import tokenise
    from ..training.extract import (
        DTYPES,
        FeatureWriter,
        check_space,
        human,
        parse_teacher,
        remaining,
        settings_of,
        stored_bytes,
    )
    from ..training.extract import extract as run
    from ..training.interrupt import StopRequest
    from ..training.masks import AssistantMasks, show, stop_ids_of
    from ..training.target_states import TargetTeacher
    from .common import thread_count

    show_log()
    kind, top_k = parse_teacher(teacher)
    variables, columns = template_options(template), parse_columns(column or [])
    if store_dtype not in DTYPES:
        raise ValueError(f"--store-dtype must be one of {', '.join(DTYPES)}, got {store_dtype!r}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    model, tokenizer = _load(target, dtype, device)
    source = TargetTeacher(model, aux_layer, kind, top_k)
    masks = None
    if tokenizer.chat_template:
        masks = AssistantMasks(tokenizer, stop_ids_of(model, tokenizer), variables)
    conversations = read_conversations(
        data, columns=columns, streaming=streaming, shuffle_seed=shuffle, limit=limit, skip_bad=skip_bad
    )
    documents = list(
        tokenise(conversations, masks, vocab_size=source.vocab_size, max_length=max_length, skip_bad=skip_bad)
    )
    sample = documents[0]
    console.print(
        f"learned between « and »: {show(tokenizer, sample.input_ids.tolist(), sample.loss_mask.tolist())}",
        markup=False,
    )
    settings = settings_of(source, target, DTYPES[store_dtype]) | {"max_length": max_length}
    if dry_run and not out.exists():
        left = remaining(documents, set())
        size = stored_bytes(left, source, DTYPES[store_dtype])
        console.print(f"{len(left)} documents of {sum(map(len, left))} tokens: {human(size)} to write")
        return
    with thread_count(threads), FeatureWriter(out, settings) as writer:
        left = remaining(documents, writer.present)
        size = stored_bytes(left, source, DTYPES[store_dtype])
        free = check_space(out, size)
        tokens = sum(map(len, left))
        console.print(
            f"{len(left)} documents of {tokens} tokens to do, {len(writer.present)} done: {human(size)} to write, "
            f"{human(free)} free"
        )
        if dry_run:
            return
        with StopRequest() as stop, progress_bar("features", tokens, 0, "tokens") as advance:
            done = run(
                left,
                source,
                writer,
                dtype=DTYPES[store_dtype],
                batch_tokens=batch_tokens,
                shard_documents=shard_documents,
                stop=lambda: stop.requested,
                progress=lambda now: advance(now.tokens, now.tokens),
            )
        total = len(writer.present)
    Console(highlight=False, soft_wrap=True).print(
        f"{total} documents in {out}, {done.documents} of them with {done.tokens} tokens in this run"
    )
    if stop.requested:
        console.print("stopped; the same command goes on from here")
        raise typer.Exit(stop.exit_status)
