"""The numbers of a training run as a draft's `README.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .recipe import Recipe


def _count(value: float) -> str:
    for size, name in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{name}"
    return str(int(value))


def _draft_rows(recipe: Recipe, config: Any) -> list[tuple[str, str]]:
    return [
        ("aux hidden states", f"inputs of decoder layers {', '.join(map(str, config.aux_hidden_state_layers or []))}"),
        ("draft vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("started from", recipe.draft.initialise),
    ]


def training_card(recipe: Recipe, draft: Any, numbers: Mapping[str, Any]) -> str:
    """Markdown for the saved draft: what it is, how long it was trained, what it reached.

    Args:
        recipe: of the run.
        draft: the saved draft.
        numbers: what `training.json` holds.

    The licence and the acceptance on datasets are left to whoever publishes it (`draft.push_to_hub`).
    """
    config, evaluation = draft.config, numbers.get("evaluation") or {}
    name = recipe.target.model
    kind = "Draft model" if recipe.objective.kind == "plain" else "EAGLE-3 draft"
    plain = recipe.objective.kind == "plain"
    shape = [("started from", recipe.draft.model)] if plain else _draft_rows(recipe, config)
    processes = numbers["processes"]
    device = f"{processes} process{'es' if processes > 1 else ''} on {numbers['device']}"
    rows = [
        ("target", name),
        ("size", f"{_count(sum(p.numel() for p in draft.parameters()))} parameters, {recipe.draft.dtype}"),
        *shape,
        ("objective", recipe.objective.loss + ("" if plain else f", {recipe.objective.steps} steps")),
        (
            "training",
            f"{numbers['updates']:,} updates, {_count(numbers['tokens'])} tokens, {numbers['hours']:.2f} hours, "
            f"{device}",
        ),
    ]
    lines = ["---", "tags: [eagle3, speculative-decoding, eagle3-hf]", "---", "", f"# {kind} for {name}", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows), "", "## Acceptance", ""]
    if evaluation:
        steps = [key for key in evaluation if key.startswith("eval_accuracy_")]
        lines += ["On held-out documents of the training data, chain drafts, simulated:", "", "| | |", "|---|---|"]
        lines += [f"| tau, {len(steps)} draft tokens a round | {evaluation['eval_tau']:.2f} |"]
        lines += [f"| step {key[14:]} right | {100 * evaluation[key]:.1f} % |" for key in steps]
    else:
        lines += ["Not measured."]
    generation = numbers.get("generation") or {}
    if generation:
        lines += [
            "",
            f"Greedy `generate()` on held-out prompts: tau {generation['eval_generate_tau']:.2f} "
            f"(update {generation['step']}).",
        ]
    return "\n".join([*lines, ""])
