"""`eagle3-hf regenerate`: the target answers the prompts of a dataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .options import DeviceOption, SeedOption, TargetOption, ThreadsOption
from .training_options import (
    ColumnOption,
    DataOption,
    LimitOption,
    ShuffleOption,
    SkipBadOption,
    StreamingOption,
    TemplateOption,
    parse_json,
    progress_bar,
    show_log,
    template_options,
)

if TYPE_CHECKING:
    from ..training.regenerate import LocalAnswers, ServerAnswers


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if slash and number.isdigit() and count.isdigit() and int(number) < int(count):
        return int(number), int(count)
    raise ValueError(f"a part is I/N with I from 0 to N-1, like 0/4; got {text!r}")


def _local(target: str, dtype: str, device: str, **options: Any) -> LocalAnswers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .. import resolve_model
    from ..training.masks import stop_ids_of
    from ..training.regenerate import LocalAnswers
    from .common import check_device, check_model_name, pick_dtype, quiet_libraries

    quiet_libraries()
    check_device(device)
    path = resolve_model(check_model_name("target", target))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=pick_dtype(dtype)).to(device).eval()
    return LocalAnswers(model, tokenizer, stop_ids_of(model, tokenizer), **options)


def _remote(server: str, target: str, key_variable: str, **options: Any) -> ServerAnswers:
    from ..training.regenerate import ServerAnswers

    return ServerAnswers(server, target, api_key=os.environ.get(key_variable), **options)


def regenerate(
    data: DataOption,
    out: Annotated[Path, typer.Option("--out", help="Folder for the answers. The same command continues in it.")],
    target: TargetOption = "smollm2",
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            "--temperature",
            metavar="T[:WEIGHT]",
            help="Draw answers at T, 0 is greedy; repeat it for a mix, as 0:0.6 0.7:0.4. Default: 0:0.6, 0.7:0.4.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens an answer.")] = 512,
    max_prompt: Annotated[
        int,
        typer.Option("--max-prompt", min=1, help="Conversations longer than this are left out (not with --server)."),
    ] = 1024,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Answers to each prompt.")] = 1,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Stop after so many answer tokens over all starts.")
    ] = None,
    streams: Annotated[
        int, typer.Option("--streams", min=1, help="Answers under way at a time; with --server, requests.")
    ] = 128,
    part: Annotated[
        str, typer.Option("--part", metavar="I/N", help="Only part I of N, for N machines with a folder each.")
    ] = "0/1",
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Ask this OpenAI-compatible server, as http://host:8000/v1."),
    ] = None,
    api_key_env: Annotated[
        str, typer.Option("--api-key-env", metavar="NAME", help="Environment variable with the server's key.")
    ] = "OPENAI_API_KEY",
    server_body: Annotated[
        str, typer.Option("--server-body", metavar="JSON", help="More fields for each request to the server.")
    ] = "{}",
    column: ColumnOption = None,
    streaming: StreamingOption = False,
    shuffle: ShuffleOption = None,
    limit: LimitOption = None,
    skip_bad: SkipBadOption = False,
    template: TemplateOption = "{}",
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: Annotated[
        str, typer.Option("--dtype", help="`bfloat16`, `float16` or `float32`: of the model that answers.")
    ] = "bfloat16",
    threads: ThreadsOption = None,
) -> None:
    """Let the target answer the prompts of a dataset; answers that the data has are replaced.

    A draft learns what its target would say, so this is what it should be trained on. Every turn of a conversation is
    answered. Finished answers are on disk at once; after an interruption of any kind the same command goes on.
    """
    from ..training.data import count_conversations, parse_columns, read_conversations
    from ..training.interrupt import StopRequest
    from ..training.regenerate import AnswerStore, TemperatureMix, dialogues_of
    from ..training.regenerate import regenerate as answer_all
    from .common import thread_count

    show_log()
    variables, body = template_options(template), parse_json("--server-body", server_body)
    mix = TemperatureMix.parse(temperature or ["0:0.6", "0.7:0.4"], seed)
    columns, (number, count) = parse_columns(column or []), _part(part)
    total = None if streaming else count_conversations(data, limit)
    # What an answer depends on. More data, samples or parts only add to a folder.
    settings = {
        "target": target,
        "server": server,
        "temperatures": str(mix),
        "seed": seed,
        "max_new_tokens": max_new_tokens,
        "template": variables,
        "server_body": body,
    }
    with thread_count(threads), AnswerStore(out, settings) as store:
        shared: dict[str, Any] = {"max_new": max_new_tokens}
        answers: LocalAnswers | ServerAnswers
        if server is None:
            shared.update(streams=streams, max_prompt=max_prompt, seed=seed + store.rows, template_kwargs=variables)
            answers = _local(target, dtype, device, **shared)
        else:
            answers = _remote(server, target, api_key_env, concurrency=streams, extra=body, **shared)
        conversations = read_conversations(
            data, columns=columns, streaming=streaming, shuffle_seed=shuffle, limit=limit, skip_bad=skip_bad
        )
        dialogues = dialogues_of(
            conversations, mix, samples=samples, done=set(store.done), part=(number, count), skip_bad=skip_bad
        )
        begun = len(store.done)
        whole = None if total is None else total * samples // count
        with StopRequest() as stop, progress_bar("answers", whole, begun, "tokens") as show:
            done = answer_all(
                dialogues,
                answers,
                store,
                stop=lambda: stop.requested,
                max_tokens=max_tokens,
                progress=lambda now: show(begun + now.dialogues, now.tokens),
            )
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{len(store.done)} answered prompts with {store.answer_tokens} answer tokens in {out}, "
        f"{done.dialogues} of them in this run"
    )
    if stop.requested:
        Console(stderr=True, highlight=False).print("stopped; the same command goes on from here")
        raise typer.Exit(stop.exit_status)
