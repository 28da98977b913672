"""Ways to generate that can be compared. Each is a plug-in: a function that turns an argument into a [`Method`].

A new one needs no more than this, in a file given to `--plugin` or anywhere that is imported before the run:

    @register("mine", "mine[:N]: what it does")
    def mine(models: Models, argument: str) -> Method:
        return Method(f"mine {argument}", models.target, {"some_generate_option": int(argument or 3)})
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

PLAIN = "plain"

# Lopsided, as acceptance is: the draft's best tokens go deep, the others stay shallow.
_STATIC_PATHS = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0, 0)]


@dataclass
class Models:
    """What methods may use.

    Attributes:
        plain: the untouched target.
        target: another instance, able to speculate; on packed weights where those apply.
        draft: its EAGLE-3 draft, if one was loaded.
        assistant: a small language model with the target's vocabulary, if one was given.
        packed: whether `target` runs on packed weights.
    """

    plain: Any
    target: Any
    draft: Any = None
    assistant: Any = None
    packed: bool = False


@dataclass
class Method:
    """One way to generate.

    Attributes:
        name: shown in tables; unique in a run.
        model: whose `generate()` is called.
        options: keywords for it.
        assistant_settings: set on the generation config of its `assistant_model` during the call; transformers reads
            from there how much an ordinary assistant drafts.
        max_batch: most rows it takes; `None` for any number.
        speculates: its rounds may give several tokens, so they are recorded.
        family, depth: where one plots acceptance against the drafted depth, the curve and the place on it.
    """

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    assistant_settings: dict[str, Any] = field(default_factory=dict)
    max_batch: int | None = None
    speculates: bool = True
    family: str | None = None
    depth: int | None = None

    def facts(self, models: Models) -> dict[str, Any]:
        """What a results file keeps of it: enough to draw its results, and to see that a later one is another."""
        names = {id(value): name for name, value in vars(models).items() if name != "packed"}

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {str(key): plain(part) for key, part in value.items()}
            if isinstance(value, list | tuple):
                return [plain(part) for part in value]
            if value is None or isinstance(value, bool | int | float | str):
                return value
            # An object's text would often have its address in it.
            return names.get(id(value)) or type(value).__name__

        options = {"model": plain(self.model), **plain(self.options), **plain(self.assistant_settings)}
        shown = {"name": self.name, "family": self.family, "depth": self.depth, "max_batch": self.max_batch}
        return {**shown, "options": options}


_Factory = Callable[[Models, str], Method]
_REGISTRY: dict[str, tuple[_Factory, str]] = {}


def register(name: str, description: str) -> Callable[[_Factory], _Factory]:
    """Make a method known under `name`; `description` is a line of help that begins with how to write it."""

    def keep(factory: _Factory) -> _Factory:
        _REGISTRY[name] = (factory, description)
        return factory

    return keep


def descriptions() -> list[str]:
    """A line of help for each method."""
    return [description for _, description in _REGISTRY.values()]


def check_specs(specs: Sequence[str]) -> None:
    """ValueError for a method that isn't known or lacks what its colon promises, before any model is loaded."""
    for spec in specs:
        name, colon, argument = spec.partition(":")
        if name not in _REGISTRY:
            raise ValueError(f"no method {spec!r}; there are {', '.join(_REGISTRY)}")
        if colon and not argument:
            raise ValueError(f"{spec!r} has nothing behind its colon")


def _make(spec: str, models: Models) -> Method:
    name, _, argument = spec.partition(":")
    try:
        method = _REGISTRY[name][0](models, argument)
    except ValueError:
        raise
    except Exception as error:  # a plug-in's, which may be of any kind
        raise ValueError(f"method {spec!r}: {type(error).__name__}: {error}") from error
    if not isinstance(method, Method):
        raise ValueError(f"method {spec!r}: its function must return a Method, it gave {method!r}")
    return method


def make_methods(specs: Sequence[str], models: Models) -> list[Method]:
    """Methods for `NAME[:ARGUMENT]` texts, each once; plain generation is always the first.

    Raises:
        ValueError: a method that isn't known, an argument it can't take, a model it lacks, two different methods of
            one name (results are kept by name).
    """
    check_specs(specs)
    methods: dict[str, Method] = {}
    for spec in dict.fromkeys([PLAIN, *specs]):
        method = _make(spec, models)
        if methods.setdefault(method.name, method).facts(models) != method.facts(models):
            raise ValueError(f"{spec!r} makes a second method called {method.name!r} with other options: name it apart")
    return list(methods.values())


def uses_draft(spec: str) -> bool:
    """Whether a built-in method needs the EAGLE-3 draft; plug-ins may."""
    return spec.partition(":")[0] not in {PLAIN, "packed", "prompt-lookup", "assisted", "early-exit"}


def load_plugin(path: Path) -> None:
    """Run a Python file, which registers methods.

    Raises:
        ValueError: no such file, or it fails; the message has its error.
    """
    if not path.is_file():
        raise ValueError(f"no plug-in file at {path}")
    spec = importlib.util.spec_from_file_location(f"eagle3_hf_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"a plug-in is a Python file, got {path}")
    try:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:
        raise ValueError(f"plug-in {path}: {type(error).__name__}: {error}") from error


def _number(argument: str, default: int, what: str) -> int:
    try:
        number = int(argument or default)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError(f"{what} takes a whole number from 1 up, got {argument!r}")
    return number


def _needs(model: Any, what: str, option: str) -> Any:
    if model is None:
        raise ValueError(f"{what} needs {option}")
    return model


def _no_argument(argument: str, what: str) -> None:
    if argument:
        raise ValueError(f"{what} takes no argument, got {argument!r}")


@register(PLAIN, "plain: transformers' generate() on the untouched model")
def _plain(models: Models, argument: str) -> Method:
    _no_argument(argument, PLAIN)
    return Method(PLAIN, models.plain, speculates=False)


@register("packed", "packed: the same on packed weights (CPU, float32), which all other methods run on")
def _packed(models: Models, argument: str) -> Method:
    _no_argument(argument, "packed")
    if not models.packed:
        raise ValueError("packed needs a float32 target on a CPU: no weights are packed here")
    return Method("plain, packed", models.target, speculates=False)


@register("prompt-lookup", "prompt-lookup[:N]: transformers' own, N tokens copied from earlier in the text (10)")
def _prompt_lookup(models: Models, argument: str) -> Method:
    tokens = _number(argument, 10, "prompt-lookup")
    return Method(f"prompt lookup {tokens}", models.target, {"prompt_lookup_num_tokens": tokens}, max_batch=1)


@register("assisted", "assisted[:N]: transformers' own with the small model of --assistant; N tokens (its schedule)")
def _assisted(models: Models, argument: str) -> Method:
    small = _needs(models.assistant, "assisted", "a small model: --assistant FOLDER")
    settings: dict[str, Any] = {}
    if argument:
        # A fixed number of tokens; without one, transformers' own schedule and confidence threshold apply.
        tokens = _number(argument, 5, "assisted")
        settings = {"num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant"}
        settings["assistant_confidence_threshold"] = 0.0
    return Method(f"assisted {argument}".strip(), models.target, {"assistant_model": small}, settings, max_batch=1)


@register("early-exit", "early-exit[:N]: transformers' own, the target's first N layers draft (a third of them)")
def _early_exit(models: Models, argument: str) -> Method:
    layers = models.target.config.get_text_config().num_hidden_layers
    exit_at = _number(argument, max(1, layers // 3), "early-exit")
    if exit_at >= layers:
        raise ValueError(f"early-exit:{exit_at} needs a target of more layers, this one has {layers}")
    return Method(f"early exit {exit_at}", models.target, {"assistant_early_exit": exit_at}, max_batch=1)


def _ours(models: Models, name: str, family: str, depth: int, **options: Any) -> Method:
    draft = _needs(models.draft, name, "an EAGLE-3 draft: --draft FOLDER")
    return Method(name, models.target, {"assistant_model": draft, **options}, family=family, depth=depth)


@register("chain", "chain[:K]: EAGLE-3, K tokens in a chain (the draft's own number)")
def _chain(models: Models, argument: str) -> Method:
    own = getattr(getattr(models.draft, "generation_config", None), "num_assistant_tokens", None) or 4
    depth = _number(argument, own, "chain")
    return _ours(models, f"chain {depth}", "chain", depth, num_assistant_tokens=depth, tree_top_k=1)


@register("static", "static[:A,B,...]: EAGLE-3, a fixed tree with A children of the root, B of each of those, ...")
def _static(models: Models, argument: str) -> Method:
    if not argument:
        return _ours(models, "static tree", "static tree", 5, tree_paths=_STATIC_PATHS)
    widths = [_number(part, 0, "static") for part in argument.split(",")]
    paths = [path for depth in range(1, len(widths) + 1) for path in product(*map(range, widths[:depth]))]
    return _ours(models, f"static {argument}", "static tree", len(widths), tree_paths=paths)


@register("tree", "tree[:K:TOPK:TOTAL]: EAGLE-3, a dynamic tree: depth, children a node, nodes (5:4:16)")
def _tree(models: Models, argument: str) -> Method:
    try:
        depth, top_k, total = (_number(part, 0, "tree") for part in (argument or "5:4:16").split(":"))
    except ValueError:
        raise ValueError(f"a tree is K:topk:total, three whole numbers like 5:4:16; got {argument!r}") from None
    options = {"num_assistant_tokens": depth, "tree_top_k": top_k, "tree_total_tokens": total}
    return _ours(models, f"tree {depth}:{top_k}:{total}", f"tree {top_k}:{total}", depth, **options)
