"""What the values of a recipe must be, beyond their types."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .recipe_values import nearest

if TYPE_CHECKING:
    from .recipe import Recipe

_DTYPES = ("auto", "float32", "bfloat16", "float16")
# The least value of each number; `None` is allowed where the type allows it.
_LEAST: dict[str, float] = {
    "draft.vocab_size": 1,
    "draft.hidden_size": 1,
    "draft.intermediate_size": 1,
    "draft.num_hidden_layers": 1,
    "draft.num_attention_heads": 1,
    "draft.num_key_value_heads": 1,
    "draft.head_dim": 1,
    "draft.fc_noise": 0,
    "draft.num_assistant_tokens": 1,
    "draft.tree_top_k": 1,
    "draft.tree_total_tokens": 1,
    "data.tokens_per_batch": 1,
    "data.window": 1,
    "data.pack_length": 3,
    "data.max_length": 3,
    "data.limit": 1,
    "objective.steps": 1,
    "objective.step_decay": 0,
    "objective.measure_every": 1,
    "evaluation.documents": 1,
    "evaluation.chain": 1,
    "evaluation.generate_every": 0,
    "evaluation.generate_prompts": 1,
    "evaluation.generate_new_tokens": 1,
    "evaluation.early_stopping_patience": 0,
    "evaluation.early_stopping_threshold": 0,
    "training.gradient_accumulation_steps": 1,
    "training.learning_rate": 0,
    "training.weight_decay": 0,
    "training.max_grad_norm": 0,
    "training.warmup_steps": 0,
    "training.eval_steps": 0,
    "training.seed": 0,
    "training.data_seed": 0,
    "training.save_total_limit": 1,
    "training.dataloader_num_workers": 0,
}


def _check_mode(recipe: Recipe) -> None:
    """Keys that the other mode of features would read."""
    if recipe.features.mode == "online":
        if recipe.features.folder is not None:
            raise ValueError("features.folder is for features.mode offline; online reads data.sources: leave one out")
        return
    usual = type(recipe.data)()
    for key in ("sources", "columns", "template", "max_length", "limit", "skip_bad"):
        if getattr(recipe.data, key) != getattr(usual, key):
            raise ValueError(f"data.{key} is for features.mode online; offline, say it to `eagle3-hf extract`")
    if recipe.features.teacher != "hidden":
        raise ValueError("features.teacher is for features.mode online; offline it is that of the stored features")


def _check_ranges(recipe: Recipe) -> None:
    values: dict[str, Any] = recipe.as_dict()
    for name, least in _LEAST.items():
        section, _, key = name.partition(".")
        value = values[section].get(key)
        if isinstance(value, (int, float)) and not (math.isfinite(value) and value >= least):
            raise ValueError(f"{name} must be at least {least}, got {value}")
    steps = recipe.training.get("save_steps")
    if isinstance(steps, (int, float)) and steps <= 0:
        raise ValueError(f"training.save_steps must be above 0, got {steps}; training.save_strategy: no never saves")


def _choice(name: str, value: str, allowed: Iterable[str]) -> None:
    allowed = list(allowed)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}{nearest(value, allowed)}; it must be one of {', '.join(allowed)}")


def check_values(recipe: Recipe) -> None:
    """Check what the types don't say.

    Raises:
        ValueError: a value that is no choice or out of its range, or values that contradict each other.
    """
    target, draft, data, features = recipe.target, recipe.draft, recipe.data, recipe.features
    objective, evaluation = recipe.objective, recipe.evaluation
    _choice("target.dtype", target.dtype, _DTYPES)
    _choice("draft.dtype", draft.dtype, _DTYPES[1:])
    _choice("features.mode", features.mode, ("offline", "online"))
    _choice("features.teacher", features.teacher, ("hidden", "logits"))
    _choice("objective.kind", objective.kind, ("eagle3", "plain"))
    _choice("objective.mass", objective.mass, ("vocabulary", "full"))
    _choice("objective.attention", objective.attention, ("auto", "flash", "blocks", "flex", "dense"))
    if not 0 <= data.held_out < 1:
        raise ValueError(f"data.held_out is a share below 1, got {data.held_out}")
    _check_ranges(recipe)
    if objective.step_weights is not None and len(objective.step_weights) != objective.steps:
        raise ValueError(
            f"objective.step_weights has {len(objective.step_weights)} weights for objective.steps {objective.steps}"
        )
    try:
        from .losses import parse_loss

        parse_loss(objective.loss)
    except ValueError as error:
        raise ValueError(f"objective.loss: {error}") from None
    _check_mode(recipe)
    if objective.kind == "plain" and draft.model is None:
        raise ValueError("objective.kind plain trains an ordinary model: draft.model says which")
    if objective.kind == "plain" and features.mode != "online":
        raise ValueError("objective.kind plain has no stored features: set features.mode: online and data.sources")
    if objective.kind == "plain" and evaluation.generate_every:
        raise ValueError("evaluation.generate_every is for EAGLE-3 drafts: measure two-model speculation with `eval`")
    if objective.kind == "eagle3" and draft.model is not None:
        raise ValueError("draft.model is for objective.kind plain; an EAGLE-3 draft goes on from draft.initialise")
    if objective.step_weights is not None and not (min(objective.step_weights) >= 0 < sum(objective.step_weights)):
        raise ValueError(f"objective.step_weights must not be negative, nor all 0; got {objective.step_weights}")
    every, steps = evaluation.generate_every, recipe.training.get("eval_steps")
    if steps and data.held_out == 0:
        raise ValueError(
            "training.eval_steps needs held-out documents: set data.held_out above 0, or training.eval_steps: null"
        )
    if every and not steps and str(recipe.training.get("eval_strategy", "no")) == "no":
        raise ValueError("evaluation.generate_every needs evaluations: set training.eval_steps, which divides it")
    if every and steps and every % steps:
        raise ValueError(f"evaluation.generate_every {every} must be a multiple of training.eval_steps {steps}")
