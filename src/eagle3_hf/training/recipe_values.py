"""Values of a recipe: YAML without surprises, and types that are checked instead of guessed."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """YAML without silent surprises: a key given twice is an error."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if key in seen:
                raise ValueError(f"key {key!r} is given twice, in lines {seen[key]} and {line}")
            seen[key] = line
        return super().construct_mapping(node, deep)


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value` as the annotation `kind` wants it.

    Whole numbers become floats, and `1e-4`, which YAML 1.1 takes for a word, a number; nothing else is converted.

    Raises:
        ValueError: another type; the message has the key's name, the value and the types that are right.
    """
    allowed = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    for one in allowed:
        origin = typing.get_origin(one) or one
        if origin is Any:
            return value
        if origin is type(None):
            if value is None:
                return None
        elif origin is bool or origin is str:
            if isinstance(value, origin):
                return value
        elif origin is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif origin is float:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value)
            if isinstance(value, str) and str not in allowed and "e" in value.lower():
                try:
                    return float(value)
                except ValueError:
                    continue
        elif origin is list and isinstance(value, (list, tuple)):
            (item,) = typing.get_args(one) or (Any,)
            return [convert(f"{name}[{i}]", part, item) for i, part in enumerate(value)]
        elif origin is dict and isinstance(value, Mapping):
            return dict(value)
    expected = " or ".join(_type_name(one) for one in allowed)
    raise ValueError(f"{name} must be {expected}, got {kind_of(value)} {value!r}")


def _type_name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    if typing.get_origin(kind) is list:
        return "a list, each item " + _type_name((typing.get_args(kind) or (str,))[0])
    return names.get(kind, "a mapping" if (typing.get_origin(kind) or kind) is dict else str(kind))


def kind_of(value: Any) -> str:
    names = {bool: "the truth value", int: "the whole number", float: "the number", str: "the text", dict: "a mapping"}
    return "nothing" if value is None else names.get(type(value), f"a {type(value).__name__}")


def nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f": did you mean {found[0]!r}?" if found else ""
