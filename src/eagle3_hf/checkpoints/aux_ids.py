"""Aux layer ids: the same three states have two numberings in the wild; this settles which one a file uses.

`hidden_states[i]`, the **input** of layer `i`, is this package's id `i`. Top-level ids (speculators, vLLM) are that.
Ids inside `eagle_config` (ModelOpt, SpecForge) and AngelSlim's name the layer whose **output** is read: one less.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..aux_layers import FINAL_STATE
from .provenance import AuxIds

TOP = "eagle_aux_hidden_state_layer_ids"
ANGELSLIM = "aux_hidden_states_layer_ids"
_INPUT = "number i is the input of layer i"
_FINAL = "false: the output of the target's final norm, read as it is"
_OUTPUT = "number i is the output of layer i, the input of layer i+1"


def written_ids(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every list of aux ids in a `config.json`, by the key it stands under.

    Raises:
        ValueError: one that isn't a list of whole numbers.
    """
    nested = config.get("eagle_config")
    places = {
        TOP: config.get(TOP),
        f"eagle_config.{TOP}": nested.get(TOP) if isinstance(nested, dict) else None,
        ANGELSLIM: config.get(ANGELSLIM),
    }
    found = {}
    for key, value in places.items():
        if value is None or value == []:
            continue
        if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            raise ValueError(f"{key} must be a list of whole numbers, got {value!r}")
        found[key] = tuple(value)
    return found


def _nested(ids: tuple[int, ...], num_layers: int | None) -> tuple[tuple[int, ...], str]:
    if ids[0] == 2:
        return ids, f"{_INPUT}: the list begins with 2, as only lists of inputs do"
    if num_layers is not None and max(ids) == num_layers:
        return ids, f"{_INPUT}: {num_layers} is the number of layers, which has no output of its own"
    if num_layers is None:
        # If that reading is wrong, the last id lies beyond the target, which is an error as soon as there is one.
        return tuple(i + 1 for i in ids), f"{_OUTPUT}; unless the target has {max(ids)} layers, then pass target="
    return tuple(i + 1 for i in ids), _OUTPUT


def _callers_ids(override: Any) -> tuple[int, ...]:
    ids = tuple(override) if isinstance(override, Iterable) and not isinstance(override, str) else None
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"aux_hidden_state_layers must be a list of whole numbers, got {override!r}")
    return ids


def resolve_aux_ids(
    config: dict[str, Any],
    num_aux: int,
    num_layers: int | None = None,
    override: Iterable[int] | None = None,
    single: bool = False,
) -> tuple[AuxIds, list[str]]:
    """Settle the aux ids of a checkpoint.

    Args:
        config: its `config.json`.
        num_aux: how many states its `fc` reads.
        num_layers: layers of the target, where known.
        override: the user's own ids, on this package's axis; they win.
        single: the draft has no `fc` and reads one state, the target's last unless the user names another.

    Returns:
        The ids with their origin, and warnings.

    Raises:
        ValueError: their number isn't `num_aux`, they lie outside the target, or they repeat.
    """
    warnings: list[str] = []
    found = written_ids(config)
    if override is not None:
        made = AuxIds(_callers_ids(override), "caller", None, _INPUT)
    elif single:
        made = AuxIds((FINAL_STATE,), "use_aux_hidden_state", None, _FINAL)
        warnings += [f"{key} = {list(ids)} is ignored: use_aux_hidden_state is false" for key, ids in found.items()]
    elif not found:
        if num_aux != 3:
            raise ValueError(
                f"the draft reads {num_aux} aux hidden states and its config doesn't say which: pass "
                "aux_hidden_state_layers=[...] (id i is the input of layer i)"
            )
        made = AuxIds(None, "default", None, "no ids in the config; all implementations default to these")
    else:
        readings = {}
        for key, ids in found.items():
            if key == TOP:
                readings[key] = (ids, _INPUT)
            elif key == ANGELSLIM:
                readings[key] = (tuple(i + 1 for i in ids), _OUTPUT)
            else:
                readings[key] = _nested(ids, num_layers)
        key = next(iter(readings))  # the top-level key first
        made = AuxIds(readings[key][0], key, found[key], readings[key][1])
        for other, (reading, _) in readings.items():
            if reading != made.ids:
                warnings.append(
                    f"{key} = {list(found[key])} and {other} = {list(found[other])} name different states; the first "
                    "is used. `eagle3-hf probe` measures which is right"
                )
    if made.ids is None:
        return made, warnings
    if list(made.ids) != sorted(made.ids):
        # Every implementation concatenates low to high, whatever the order in the config.
        warnings.append(f"aux ids {list(made.ids)} aren't ascending; states are always joined from low to high")
        made = AuxIds(tuple(sorted(made.ids)), made.source, made.written, made.convention)
    _check(made, num_aux, num_layers)
    return made, warnings


def _check(made: AuxIds, num_aux: int, num_layers: int | None) -> None:
    ids = made.ids or ()
    if len(ids) != num_aux:
        raise ValueError(
            f"{made.source} gives {len(ids)} aux ids {list(ids)}, but "
            + (f"fc reads {num_aux} states" if num_aux > 1 else "the draft reads one state")
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{made.source} repeats an aux id: {list(ids)}")
    if ids == (FINAL_STATE,):
        return
    if min(ids) < 0 or (num_layers is not None and max(ids) > num_layers):
        raise ValueError(
            f"{made.source} gives aux ids {list(ids)} (as inputs), outside 0..{num_layers or 'the number of layers'} "
            "of the target"
        )
