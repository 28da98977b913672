"""Recipes: one YAML file that says everything about a training run, read into typed sections.

A mistake is an error that names the key: an unknown one with the nearest known name, a value of the wrong type with
what was expected. Nothing is guessed and nothing is ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .recipe_checks import check_values
from .recipe_values import StrictLoader, convert, kind_of, nearest


@dataclass
class TargetSection:
    """The model that the draft is for.

    Attributes:
        model: `smollm2`, a model folder or a Hub id.
        model_type: transformers' name of its architecture. A dry run needs it where the model's config can't be read
            (no network); otherwise it is checked against the config.
        dtype: how the target is loaded: `auto`, `float32`, `bfloat16` or `float16`.
        attn_implementation: transformers' attention for it; `None` leaves the choice to transformers.
        revision: branch, tag or commit on the Hub.
    """

    model: str
    model_type: str | None = None
    dtype: str = "auto"
    attn_implementation: str | None = None
    revision: str | None = None


@dataclass
class DraftSection:
    """What is trained, and how it starts. Sizes that are `None` are the target's.

    Attributes:
        initialise: `target` (its last layers and head rows), `scratch` (random), or a draft folder or Hub id to go on
            from.
        model: for `objective.kind: plain`: the small causal LM, a folder or Hub id; everything else here but `dtype`
            is for EAGLE-3 drafts.
        vocab_size: rows of the head, the most frequent tokens of the data; `None` keeps the whole vocabulary.
        aux_hidden_state_layers: which layer inputs the draft reads; `None`: those of the features, else the default.
        own_embeddings: the draft trains an embedding table of its own, else it reads the target's.
        fc_noise: standard deviation around the identity that `fc` starts from (`initialise: target`).
        dtype: of the saved draft. Training keeps float32 weights.
        num_assistant_tokens, tree_top_k, tree_total_tokens: written to the draft's `generation_config.json`.
    """

    initialise: str = "target"
    model: str | None = None
    vocab_size: int | None = None
    aux_hidden_state_layers: list[int] | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    fc_bias: bool | None = None
    qk_norm: bool | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    final_norm: bool | None = None
    own_embeddings: bool | None = None
    fc_noise: float = 1e-3
    dtype: str = "bfloat16"
    num_assistant_tokens: int | None = None
    tree_top_k: int | None = None
    tree_total_tokens: int | None = None


@dataclass
class DataSection:
    """What is trained on, and how it is cut into batches.

    Attributes:
        held_out: share of the documents that are only evaluated on; which ones is settled by a hash of each.
        tokens_per_batch: most padded tokens in a batch of one process (a longer document is a batch by itself).
        window: documents that are sorted by length together; more makes less padding and less random batches.
        pack_length: tokens a row; the documents of a batch then share rows instead of being padded. `None`: padded.
        sources: for `features.mode: online`, the conversations: files, folders or Hub ids, as for `eagle3-hf extract`.
        columns: which column holds `messages`, or `prompt`, `response` and `system`, where the names aren't usual.
        template: further variables for the chat template.
        max_length: documents are cut to so many tokens.
        limit: most conversations of each source.
        skip_bad: leave out rows that hold no conversation instead of stopping at the first.
    """

    held_out: float = 0.02
    tokens_per_batch: int = 8192
    window: int = 256
    pack_length: int | None = None
    sources: list[str] | None = None
    columns: dict[str, str] | None = None
    template: dict[str, Any] | None = None
    max_length: int = 2048
    limit: int | None = None
    skip_bad: bool = False


@dataclass
class FeaturesSection:
    """Where the target's states come from.

    Attributes:
        mode: `offline` reads what `eagle3-hf extract` wrote, `online` runs the target in the loop.
        folder: the folder of `extract`.
        teacher: online: `hidden` (the target's head is applied again for the draft's vocabulary) or `logits`, for
            targets that scale or cap their logits. Offline, the folder's.
    """

    mode: str = "offline"
    folder: str | None = None
    teacher: str = "hidden"


@dataclass
class ObjectiveSection:
    """What is minimised.

    Attributes:
        kind: `eagle3` (training-time test) or `plain` (an ordinary small LM learns the target's distribution).
        loss: name of a loss, or a weighted sum of names such as `kl+0.5*total_variation`; see docs/training.md.
        mass: `vocabulary`: the target's distribution is renormalised over the draft's vocabulary; `full`: it isn't.
        attention: backend of the test steps' attention, see docs/training.md.
        steps: draft steps that are trained.
        step_decay: step `k` weighs `step_decay ** k`.
        step_weights: the weights themselves, instead.
        measure_every: updates between two looks at the training accuracy (each costs about a tenth of a step).
    """

    kind: str = "eagle3"
    loss: str = "soft_cross_entropy"
    mass: str = "vocabulary"
    attention: str = "auto"
    steps: int = 4
    step_decay: float = 0.8
    step_weights: list[float] | None = None
    measure_every: int = 5

    @property
    def weights(self) -> list[float]:
        """One weight a step."""
        return list(self.step_weights or (self.step_decay**k for k in range(self.steps)))


@dataclass
class EvaluationSection:
    """How the draft is judged while it trains. How often is `training.eval_steps`.

    Attributes:
        documents: most held-out documents that are looked at.
        chain: draft tokens a round of the simulated acceptance length.
        generate_every: updates between two evaluations by real `generate()`; a multiple of `training.eval_steps`.
            0: never.
        generate_prompts: how many held-out prompts it takes.
        generate_new_tokens: tokens each of them gets.
        early_stopping_patience: evaluations without a better `tau` after which training stops; 0: never.
        early_stopping_threshold: how much better counts.
    """

    documents: int = 48
    chain: int = 4
    generate_every: int = 0
    generate_prompts: int = 8
    generate_new_tokens: int = 64
    early_stopping_patience: int = 0
    early_stopping_threshold: float = 0.0


@dataclass
class Recipe:
    """A whole run. `training` holds fields of `transformers.TrainingArguments`."""

    target: TargetSection
    draft: DraftSection = field(default_factory=DraftSection)
    data: DataSection = field(default_factory=DataSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    training: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the YAML file, defaults filled in."""
        return dataclasses.asdict(self)

    def dump(self) -> str:
        """The recipe as YAML."""
        return yaml.safe_dump(self.as_dict(), sort_keys=False, allow_unicode=True)


def load_recipe(path: str | os.PathLike, overrides: Iterable[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: `section.key=value` each, the value in YAML; they win over the file.

    Raises:
        OSError: no such file.
        ValueError: no YAML, an unknown key, a value of the wrong type, or values that contradict each other.
    """
    try:
        content = yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: a recipe is a mapping of sections, this is {kind_of(content)}")
    for override in overrides:
        apply_override(content, override)
    try:
        return parse_recipe(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def apply_override(content: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into `content`."""
    name, equals, text = override.partition("=")
    parts = name.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ValueError(f"--set takes section.key=value, for example training.max_steps=100; got {override!r}")
    place = content
    for part in parts[:-1]:
        below = place.setdefault(part, {})
        if below is None:
            below = place[part] = {}
        if not isinstance(below, dict):
            raise ValueError(f"--set {override}: {part} is {kind_of(below)}, no section")
        place = below
    try:
        place[parts[-1]] = yaml.load(text, StrictLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--set {override}: the value isn't YAML: {error}") from None


def parse_recipe(content: Mapping[str, Any]) -> Recipe:
    """Check the content of a recipe file.

    Raises:
        ValueError: see [`load_recipe`].
    """
    hints = typing.get_type_hints(Recipe)
    sections: dict[str, Any] = {}
    for name, value in content.items():
        if name not in hints:
            raise ValueError(f"unknown section {name!r}{nearest(str(name), hints)}; sections are {', '.join(hints)}")
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ValueError(f"section {name} must be a mapping of keys to values, got {kind_of(value)}")
        sections[name] = dict(value) if name == "training" else _section(name, hints[name], value)
    if "target" not in sections:
        raise ValueError("section target is missing: target.model says which model the draft is for")
    check_training_keys(sections.setdefault("training", {}))
    recipe = Recipe(**sections)
    check_values(recipe)
    return recipe


def _section(name: str, kind: Any, value: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    made = {}
    for key, item in value.items():
        if key not in hints:
            raise ValueError(f"unknown key {name}.{key}{_hint(name, str(key), hints)}")
        made[key] = convert(f"{name}.{key}", item, hints[key])
    missing = [f.name for f in dataclasses.fields(kind) if f.name not in made and _required(f)]
    if missing:
        raise ValueError(f"{name}.{missing[0]} is missing")
    return kind(**made)


def _required(one: Any) -> bool:
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _hint(section: str, key: str, known: Iterable[str]) -> str:
    """Where the key may have been meant to go: a near name here, or the very name in another section."""
    known = list(known)
    found = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not found:
        for other, kind in typing.get_type_hints(Recipe).items():
            keys = training_keys() if other == "training" else typing.get_type_hints(kind)
            if other != section and key in keys:
                return f": did you mean {other}.{key}?"
        found = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if found:
        return f": did you mean {section}.{found[0]}?"
    return f"; {section} has {', '.join(known)}" if section != "training" else ""


def training_keys() -> dict[str, Any]:
    """Fields of this transformers' `TrainingArguments` and their types (imports transformers)."""
    from transformers import TrainingArguments

    return {one.name: one.type for one in dataclasses.fields(TrainingArguments) if one.init}


def check_training_keys(values: dict[str, Any]) -> None:
    """Check section `training` against `TrainingArguments`; numbers written as `1e-4` are converted in place."""
    known = training_keys()
    try:
        from transformers import TrainingArguments

        hints = typing.get_type_hints(TrainingArguments)
    except Exception:  # an annotation that this Python can't read: the names are still checked
        hints = {}
    simple = {int, float, str, bool, type(None), dict, list}
    for key, value in values.items():
        if value is False and key.endswith("_strategy"):
            value = values[key] = "no"  # which YAML 1.1 takes for a truth value
        if key not in known:
            raise ValueError(f"unknown key training.{key}{_hint('training', str(key), known)}")
        kind = hints.get(key)
        parts = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        # Enums are given as text; what they allow is transformers' own check.
        if kind is not None and all((typing.get_origin(part) or part) in simple for part in parts):
            values[key] = convert(f"training.{key}", value, kind)
