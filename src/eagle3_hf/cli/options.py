"""Options that several commands take, and what they become as keywords of `generate()`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

TargetOption = Annotated[str, typer.Option("--target", help="Target: `smollm2`, a model folder or a Hub id.")]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft", help="EAGLE-3 draft folder or Hub id. Default: the one this checkout ships for the target."
    ),
]
NewTokensOption = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Most tokens to generate.")]
DraftTokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-assistant-tokens",
        "-K",
        min=1,
        help="Draft a chain of K. Default: the draft's own chain or tree.",
    ),
]
TreeOption = Annotated[
    str | None,
    typer.Option("--tree", metavar="K:TOPK:TOTAL", help="Draft a tree: depth, children a node, nodes. Instead of -K."),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy, above 0 samples.")]


def _check_seed(seed: int) -> int:
    if not -(2**63) <= seed < 2**63:  # a range in the option's help would say less than it takes room
        raise typer.BadParameter(f"a seed has 64 bits, {seed} needs more")
    return seed


SeedOption = Annotated[int, typer.Option("--seed", help="Seed, used when sampling.", callback=_check_seed)]
ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads. Default: torch's choice.")]
DeviceOption = Annotated[str, typer.Option("--device", help="`cpu`, `cuda`, `cuda:1`, ...")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="`float32`, `bfloat16` or `float16`.")]


def sampling_options(temperature: float, top_k: int | None = None, top_p: float | None = None) -> dict[str, Any]:
    """Keywords for `generate()`; everything that greedy search would ignore is left out."""
    if temperature == 0:
        return {"do_sample": False}
    options: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if top_k is not None:
        options["top_k"] = top_k
    if top_p is not None:
        options["top_p"] = top_p
    return options


def parse_tree(text: str) -> tuple[int, int, int]:
    """Read `K:topk:total`, the depth, children a node and nodes of a draft tree."""
    parts = text.split(":")
    try:
        depth, top_k, total = (int(part) for part in parts)
    except ValueError:
        raise ValueError(f"a tree is K:topk:total, three whole numbers like 5:4:16; got {text!r}") from None
    if min(depth, top_k, total) < 1:
        raise ValueError(f"K, topk and total of a tree must be at least 1; got {text!r}")
    return depth, top_k, total


def drafting_options(draft_tokens: int | None, tree: str | None = None) -> dict[str, Any]:
    """Keywords for `generate()` that say how to draft."""
    if tree is not None:
        if draft_tokens is not None:
            raise ValueError("--tree says K itself: don't pass -K too")
        depth, top_k, total = parse_tree(tree)
        return {"num_assistant_tokens": depth, "tree_top_k": top_k, "tree_total_tokens": total}
    # -K is a chain everywhere, also for a draft whose own way is a tree.
    return {} if draft_tokens is None else {"num_assistant_tokens": draft_tokens, "tree_top_k": 1}
