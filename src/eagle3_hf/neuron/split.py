"""A pair's weights padded to an aligned width and split over ranks, for both models with the same loaders."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ..checkpoints.padding import pad_state_dict
from ..checkpoints.sharding import check_world, shard_state_dict
from .config import Eagle3NeuronConfig
from .families import Models
from .layers import Shape
from .parallel import RANK, Group

Tensors = dict[str, torch.Tensor]


def _of(stored: Tensors, who: str) -> Tensors:
    return {name.removeprefix(f"{who}."): tensor for name, tensor in stored.items() if name.startswith(f"{who}.")}


def _pad(models: Models, width: int) -> Models:
    """The pair with target states of `width` lanes; a draft as wide as its target grows with it."""
    target, draft = models.target_shape, models.draft_shape
    if width < target.hidden_size:
        raise ValueError(f"padded_hidden_size {width} is below the target's hidden_size {target.hidden_size}")
    states = models.draft_config.num_aux_hidden_states
    together = draft.hidden_size == target.hidden_size
    own = width if together else draft.hidden_size
    stored = pad_state_dict(_of(models.stored, "target"), 0, width)
    grown = {f"target.{name}": tensor for name, tensor in stored.items()}
    stored = pad_state_dict(_of(models.stored, "draft"), states, own, width)
    grown |= {f"draft.{name}": tensor for name, tensor in stored.items()}
    real = target.hidden_size
    return replace(
        models,
        stored=grown,
        target_shape=replace(target, hidden_size=width, real_hidden=real),
        draft_shape=replace(
            draft, hidden_size=own, real_hidden=draft.hidden_size if together else None, real_features=real
        ),
    )


def _sizes(config: Any, shape: Shape) -> Any:
    """What the sharding functions read, with the head size that some configurations leave open."""
    made = copy.copy(config)
    made.head_dim = shape.head_dim
    return made


def fit(models: Models, config: Eagle3NeuronConfig, group: Group) -> Models:
    """The pair as the graphs of one rank see it. `stored` stays whole; `rank_weights` cuts it.

    Args:
        models: the pair as it was loaded.
        config: says the width and the number of ranks.
        group: the collectives to put into the graphs.

    Raises:
        ValueError: heads or MLP of one of the two can't be split, or the width is too small.
    """
    if config.padded_hidden_size is not None:
        models = _pad(models, config.padded_hidden_size)
    world = config.tensor_parallel_size
    if world == 1:
        return models
    shapes = []
    for who, whole, shape in (
        ("target", models.target_config, models.target_shape),
        ("draft", models.draft_config, models.draft_shape),
    ):
        try:
            check_world(whole, world)
        except ValueError as error:
            raise ValueError(f"tensor_parallel_size {world} doesn't suit the {who}: {error}") from None
        shapes.append(replace(shape, num_kv_heads=max(1, shape.num_kv_heads // world), group=group))
    own = {RANK: RANK}
    return replace(
        models,
        target_shape=shapes[0],
        draft_shape=shapes[1],
        target_names=models.target_names | own,
        draft_names=models.draft_names | own,
    )


def rank_weights(models: Models, rank: int, world: int) -> Tensors:
    """The stored tensors of one rank of a pair that was `fit`; all of them where there is one rank."""
    if world == 1:
        return models.stored
    made: Tensors = {RANK: torch.tensor([rank], dtype=torch.int32)}
    for who, config, shape in (
        ("target", models.target_config, models.target_shape),
        ("draft", models.draft_config, models.draft_shape),
    ):
        part = shard_state_dict(_of(models.stored, who), _sizes(config, shape), rank, world)
        made |= {f"{who}.{name}": tensor.contiguous() for name, tensor in part.items()}
    return made
